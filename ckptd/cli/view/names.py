"""Nodes in a sentence, as people and Slurm write many of them: "gpu-[0003,0007-0012]". Pure."""

import re
from collections.abc import Sequence
from functools import lru_cache

from ckptd.shared.base.wording import runs
from ckptd.system import human

_MAX_NAMES = 4  # that have no number, or differ in more than one
_MAX_RUNS = 6  # of the numbers of one name
_NUMBER_RE = re.compile(r"([0-9]+)")
_LAST_NUMBER_RE = re.compile(r"^(.*?)([0-9]+)([^0-9.]*(?:\..*)?)$", re.DOTALL)


@lru_cache(1 << 15)  # a page sorts the names of all nodes several times
def natural(name: str) -> tuple[tuple[int, str], ...]:
    """A key to sort names as people count: node2 before node10."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in _NUMBER_RE.split(name))


def named(nodes: Sequence[str]) -> str:
    """Each of a few, and runs of numbers drawn together; of more than a line has room for the first."""
    alike: dict[tuple[str, int, str], list[str]] = {}  # what is around the number, and its digits -> names
    for node in sorted(set(nodes), key=natural):
        found = _LAST_NUMBER_RE.match(node)
        alike.setdefault((found[1], len(found[2]), found[3]) if found else (node, 0, ""), []).append(node)
    if len(alike) > _MAX_NAMES and len(alike) == len(set(nodes)):
        alike = dict(list(alike.items())[:_MAX_NAMES])
    shown, left = [], len(set(nodes))
    for (head, digits, tail), names in list(alike.items())[:_MAX_NAMES]:
        numbers = [int(name[len(head) : len(head) + digits]) for name in names if digits]
        found_runs = runs(numbers)[:_MAX_RUNS]
        left -= sum(last - first + 1 for first, last in found_runs) if numbers else len(names)
        text = ",".join(f"{a:0{digits}d}" if a == b else f"{a:0{digits}d}-{b:0{digits}d}" for a, b in found_runs)
        if len(names) > 1:
            text = f"[{text}]"
        shown.append(human.printable(f"{head}{text}{tail}" if numbers else head))
    return ", ".join(shown) + (f" and {left:,} more" if left > 0 else "")


def counted_nodes(nodes: Sequence[str], total: int) -> str:
    """For a sentence: "node b", "nodes 3, 7-12", and how many of how many where they are many."""
    noun, count = ("node", "") if len(nodes) == 1 else ("nodes", f"{len(nodes):,} ")
    of_how_many = f" ({count}of {total:,})" if total > _MAX_NAMES and len(nodes) < total else ""
    return f"{noun} {named(nodes)}{of_how_many}"
