"""The tables of the core's machines, and which of their rows tests reach; ``python -m tests.states`` draws them."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ckptd.core.beside import Beside
from ckptd.core.coordinator.admission_states import ADMISSION
from ckptd.core.coordinator.protection_states import PROTECTION
from ckptd.core.coordinator.restore_states import RESTORE
from ckptd.core.coordinator.save_states import SAVE
from ckptd.core.coordinator.scrub_states import MEMORY_SCRUB, STORE_SCRUB
from ckptd.core.coordinator.session_states import SESSION
from ckptd.core.coordinator.state_table import Table

TABLES: dict[str, Table[Any, Any]] = {
    "save": SAVE, "protection": PROTECTION, "admission": ADMISSION, "session": SESSION, "load": RESTORE,
    "memory scrub": MEMORY_SCRUB, "store scrub": STORE_SCRUB,
}  # fmt: skip


@contextmanager
def reached(rows: Counter[str]) -> Iterator[Counter[str]]:
    """Counts, by name, the rows that are taken in this process meanwhile. What has no row, and a bug, are errors."""
    before = {name: table.trace for name, table in TABLES.items()}
    strict = Table.strict, Beside.strict
    Table.strict = Beside.strict = True
    for name, table in TABLES.items():
        table.trace = lambda *row, name=name: rows.update([name_of(name, *row)])
    try:
        yield rows
    finally:
        for name, table in TABLES.items():
            table.trace = before[name]
        Table.strict, Beside.strict = strict


def name_of(table: str, state: Any, event: Any, after: Any) -> str:
    """Of a row, as reports have it."""
    return f"{table}: {state or '-'} -> {after or '-'}: {event.value}"


def missed(rows: Counter[str]) -> list[str]:
    """Rows of the tables that are not among these."""
    names = [name_of(name, *row) for name, table in TABLES.items() for row in table.rows()]
    return [name for name in names if not rows[name]]


if __name__ == "__main__":
    for title, drawn in TABLES.items():
        print(f"{title}:\n\n{drawn.mermaid()}\n")
