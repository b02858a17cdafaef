"""Rules that a machine keeps: which room may import which, and how long files and functions get."""

import ast
import bisect
import subprocess
import sys

import pytest

from tests.unit.rooms import CKPTD as CKPTD_ROOMS
from tests.unit.rooms import CLIENT as CLIENT_ROOMS
from tests.unit.rooms import MAY, PURE, room_of, table
from tests.unit.sources import CKPTD, EVERYTHING, ROOT, imported, imports, trees, within

pytestmark = pytest.mark.xdist_group("sources")  # one parse of all of them
MAX_FILE_LINES = 450  # in all: what a reader scrolls through
MAX_CODE_LINES = 400
MAX_FUNCTION_LINES = 50
PURE_BANNED = {"asyncio", "logging", "mmap", "os", "socket", "threading", "time", "torch", "zmq"}
PURE_ALLOWED = (sys.stdlib_module_names - PURE_BANNED) | {"blake3", "msgspec", "xxhash"}
DAEMON_BANNED = {"ckptd_client", "numpy", "pickle", "torch"}
OPTIONAL = {"ckptd.checkpoint.export.casts": {"numpy"}, "ckptd.parity.engine": {"numpy"}}  # imported when it is used


def forbidden(module, name):
    """Why module must not import name, None when it may."""
    top = name.partition(".")[0]
    if top in ("ckptd", "ckptd_client"):
        here, there = room_of(module), room_of(name)
        allowed = here == there or there in MAY.get(here, ())
        return None if allowed or here == "ckptd_client" else f"{here} may not import {there}"
    if within(module, *(f"ckptd.{room}" for room in PURE)):
        return None if top in PURE_ALLOWED else "core and shared are pure"
    if within(module, "ckptd") and top in DAEMON_BANNED - OPTIONAL.get(module, set()):
        return f"the daemon's side never imports {top}"
    return None


def test_import_rule():
    named = [(module, name) for module, nodes in imports().items() for name in imported(nodes)]
    broken = {(module, name): why for module, name in named if (why := forbidden(module, name))}
    assert broken == {}


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("ckptd.core.node.node", "asyncio"),
        ("ckptd.core.node.node", "ckptd.store.posix.commit"),
        ("ckptd.core.node.node", "ckptd.core.coordinator.saves"),
        ("ckptd.shared.base.ids", "ckptd.core.node.node"),
        ("ckptd.shared.base.ids", "os"),
        ("ckptd.cli.run", "torch"),
        ("ckptd.checkpoint.export.plan", "numpy"),
        ("ckptd.checkpoint.export.casts", "torch"),
        ("ckptd.store.posix.commit", "ckptd.daemon.loop"),
        ("ckptd.daemon.loop", "ckptd.cli.run"),
        ("ckptd.store.posix.commit", "ckptd_client"),
        ("ckptd_client._state.tree", "ckptd.core.node.node"),
        ("ckptd_client._state.tree", "ckptd.system.logs"),
        ("ckptd_client._state.tree", "ckptd_client.client"),
    ],
)
def test_the_rule_catches(module, name):
    assert forbidden(module, name)


def test_one_room_writes_the_files_of_a_store():
    """And the export those of a directory that a user names; others know temporary names by sight."""
    users = {
        room_of(module) if module.startswith("ckptd.store") else module
        for module, nodes in imports().items()
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module == "ckptd.system.files"
        if any(alias.name == "FileLayer" for alias in node.names)
    }
    assert users == {"ckptd.store.posix", "ckptd.checkpoint.export.run", "ckptd.checkpoint.export.write"}


def test_rooms_stand_in_one_direction():
    """The table has no circle; core counts as one room: its halves import its events, its jobs import its halves."""
    below = {}
    for room, names in MAY.items():
        below.setdefault(floor(room), set()).update(floor(name) for name in names)
    for room, names in below.items():
        names.discard(room)
    while free := [room for room, names in below.items() if not names & below.keys()]:
        for room in free:
            del below[room]
    assert below == {}


def floor(room):
    return "ckptd.core" if within(room, "ckptd.core") else room


def test_a_stranger_finds_few_rooms():
    for rooms, most in ((CKPTD_ROOMS, 13), (CLIENT_ROOMS, 15)):
        assert len({room.partition(".")[0] for room in rooms}) <= most


def test_every_arrow_of_the_table_is_used():
    used = {(room_of(module), room_of(name)) for module, nodes in imports().items() for name in imported(nodes)}
    idle = {
        (room, name)
        for room, names in MAY.items()
        for name in names
        if name != "ckptd" and within(name, room.partition(".")[0]) and (room, name) not in used
    }
    assert idle == set()


def test_the_map_in_the_document_is_the_table():
    """``python -m tests.unit.rooms`` prints it."""
    assert table() in (ROOT / "docs" / "architecture.md").read_text()


def test_the_daemons_side_imports_without_torch():
    """Each module by itself would take minutes; one process that goes on after a failure says as much."""
    modules = [module for module in CKPTD if not module.endswith("__main__")]
    code = """
import importlib, sys
for name in ("torch", "numpy", "ckptd_client"):
    sys.modules[name] = None
failed = {}
for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
    except ImportError as error:
        failed[module] = error
sys.exit(repr(failed) if failed else 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, *modules], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_client_imports_without_what_it_need_not_have():
    """A second and a half of a training script's start, for tensors that most scripts have none of."""
    slow = ("torch.distributed.tensor", "torch.distributed.checkpoint", "torch._subclasses.fake_tensor", "sympy")
    code = "import sys, torch; before = {*sys.modules}; import ckptd_client; print(*({*sys.modules} - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert [name for name in done.stdout.split() if name.startswith(slow)] == []


def code_lines(nodes, lines):
    """Numbers of the lines of a module that hold code: no docstrings, comments or blanks; nodes: all of its tree."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    skipped = set()
    for node in nodes:
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            skipped |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    texts = ((number, text.strip()) for number, text in enumerate(lines, 1))
    return [number for number, text in texts if text and not text.startswith("#") and number not in skipped]


def test_lengths():
    long = {}
    for module, tree in trees().items():
        lines, nodes = EVERYTHING[module].read_text().splitlines(), [*ast.walk(tree)]
        code = code_lines(nodes, lines)
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = bisect.bisect_right(code, node.end_lineno) - bisect.bisect_left(code, node.lineno)
                long |= {f"{module}.{node.name}": size} if size > MAX_FUNCTION_LINES else {}
        if len(lines) > MAX_FILE_LINES or len(code) > MAX_CODE_LINES:
            long[module] = len(lines)
    assert long == {}
