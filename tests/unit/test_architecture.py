"""Rules that a machine keeps: who may import whom, how long things get, and that documents name what exists."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = {"ckptd": ROOT / "ckptd", "ckptd_client": ROOT / "client" / "ckptd_client"}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50

PURE_BANNED = {"asyncio", "logging", "mmap", "os", "socket", "threading", "time", "torch", "zmq"}
PURE_ALLOWED = (sys.stdlib_module_names - PURE_BANNED) | {"blake3", "msgspec", "xxhash"}
BULK = tuple(f"ckptd.shared.bulk.{name}" for name in ("client", "server", "sockets", "marks", "wire"))
CLIENT_SEES = (
    "ckptd.shared.protocol",
    "ckptd.shared.files.arena_location",
    "ckptd.shared.files.spare_pages",
    "ckptd.shared.files.integrity_key",
    "ckptd.shared.files.locks",
    "ckptd.shared.files.mapping",
    "ckptd.shared.files.private",
    "ckptd.shared.files.regular",
    *BULK,
)
DAEMON_BANNED = {"ckptd_client", "numpy", "pickle", "torch"}
OPTIONAL = {
    "ckptd.checkpoint.export.casts": {"numpy"},
    "ckptd.parity.engine": {"numpy"},
}  # imported when it is used, and only there
TOPS = (
    "ckptd.daemon.loop",
    "ckptd.daemon.serving",
    "ckptd.cli",
    "ckptd.__main__",
)  # who may see everything, each only from further right


def sources(package):
    base = PACKAGES[package]
    return {
        module_name(package, path.relative_to(base)): path for path in sorted(base.rglob("*.py")) if path.stat().st_size
    }


def module_name(package, relative):
    parts = [package, *relative.with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


CKPTD = sources("ckptd")
CLIENT = sources("ckptd_client")
EVERYTHING = CKPTD | CLIENT


def imports(path):
    """Modules that a file names anywhere, inside functions too. `from ckptd import x` counts as ckptd.x."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in EVERYTHING else node.module for name in names)


def within(name, *packages):
    return any(name == package or name.startswith(package + ".") for package in packages)


def forbidden(module, name):
    """Why module must not import name, None when it may."""
    top = name.partition(".")[0]
    if within(module, "ckptd_client"):
        seen = within(name, *CLIENT_SEES)
        return f"of ckptd the client sees only {CLIENT_SEES}" if top == "ckptd" and not seen else None
    if within(module, "ckptd.shared.protocol", "ckptd.core"):
        own = (
            ("ckptd.shared.protocol",)
            if within(module, "ckptd.shared.protocol")
            else ("ckptd.shared.protocol", "ckptd.core")
        )
        return None if top in PURE_ALLOWED or within(name, *own) else "protocol and core are pure"
    if top in DAEMON_BANNED - OPTIONAL.get(module, set()):
        return f"the daemon's side never imports {top}"
    rank = next((i for i, package in enumerate(TOPS) if within(module, package)), -1)
    if within(name, *TOPS[rank + 1 :]):
        return "only the command line sees the daemon, and nobody the command line"
    return None


@pytest.mark.parametrize("module", EVERYTHING)
def test_import_rule(module):
    broken = {name: why for name in imports(EVERYTHING[module]) if (why := forbidden(module, name))}
    assert broken == {}


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("ckptd.core.node.node", "asyncio"),
        ("ckptd.core.node.node", "ckptd.store.commit"),
        ("ckptd.shared.base.ids", "ckptd.core.node.node"),
        ("ckptd.shared.base.ids", "os"),
        ("ckptd.cli.run", "torch"),
        ("ckptd.checkpoint.export.plan", "numpy"),
        ("ckptd.checkpoint.export.casts", "torch"),
        ("ckptd.store.commit", "ckptd.daemon.loop"),
        ("ckptd.daemon.loop", "ckptd.cli.run"),
        ("ckptd.store.commit", "ckptd_client"),
        ("ckptd_client._state.tree", "ckptd.core.node.node"),
        ("ckptd_client._state.tree", "ckptd"),
    ],
)
def test_the_rule_catches(module, name):
    assert forbidden(module, name)


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
        [sys.executable, "-c", code, *modules], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_client_imports_without_what_it_need_not_have():
    """A second and a half of a training script's start, for tensors that most scripts have none of."""
    slow = ("torch.distributed.tensor", "torch.distributed.checkpoint", "torch._subclasses.fake_tensor", "sympy")
    code = "import sys, torch; before = {*sys.modules}; import ckptd_client; print(*({*sys.modules} - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert [name for name in done.stdout.split() if name.startswith(slow)] == []


def code_lines(tree, lines):
    """Numbers of the lines under tree that hold code: no docstrings, comments or blanks."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            skipped |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    first, last = (1, len(lines)) if isinstance(tree, ast.Module) else (tree.lineno, tree.end_lineno)
    texts = ((number, lines[number - 1].strip()) for number in range(first, last + 1))
    return [number for number, text in texts if text and not text.startswith("#") and number not in skipped]


@pytest.mark.parametrize("module", EVERYTHING)
def test_lengths(module):
    text = EVERYTHING[module].read_text()
    tree, lines = ast.parse(text), text.splitlines()
    assert len(code_lines(tree, lines)) <= MAX_FILE_LINES
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = {node.name: n for node in functions if (n := len(code_lines(node, lines))) > MAX_FUNCTION_LINES}
    assert long == {}


# --- digests ---

# Of names, numbers and what one machine's processes agree on; no byte of a checkpoint is proved by them.
NAMES_BY_DIGEST = {
    "ckptd.parity.record",  # the name of a set
    "ckptd.shared.format.integrity",
    "ckptd.shared.format.arena_paths",
    "ckptd_client._state.replica_shares",
    "ckptd_client._load.shared_read.node_group",
    "ckptd_client._image.image",
    "ckptd_client._image.plan",
    "ckptd_client._load.shared_read.read",
    "ckptd_client.dcp._items",
    "ckptd_client._gather._agreement",
    "ckptd_client._gather._leaves",
}
SAYS_WHICH = re.compile(r"integrity|proof\b|report\b|config\b|XXH3")


def takes_integrity(tree):
    """Names of what is made or called with an integrity, whose default is for tests: our own code says which."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and "integrity" in parameters(node):
            yield node.name
        elif isinstance(node, ast.ClassDef):
            made = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
            fields = [one.target.id for one in node.body if isinstance(one, ast.AnnAssign)]
            if "integrity" in [name for one in made for name in parameters(one)] + fields:
                yield node.name


def parameters(function):
    return [one.arg for one in (*function.args.args, *function.args.kwonlyargs)]


TREES = {name: ast.parse(path.read_text()) for name, path in EVERYTHING.items()}


def has(tree):
    """What a file knows by a name of one word, its own and what it imports, and where that comes from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, (node.module, alias.name)) for alias in node.names)


KNOWN = {name: dict(has(tree)) for name, tree in TREES.items()}


def defined(module, name):
    """Where a name of a module is defined: packages give on what they import."""
    while module in KNOWN and name in KNOWN[module]:
        module, name = KNOWN[module][name]
    return module, name


def known_to(module, tree):
    """All one-word names of a file that stand for something of ours, and where those are defined."""
    own = {node.name: (module, node.name) for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    return own | {name: defined(*of) for name, of in has(tree)}


def with_derived(found):
    """And all classes that derive from these: they take what their bases take, also where they say nothing of it."""
    found = set(found)
    while True:
        more = {
            (module, node.name)
            for module, tree in TREES.items()
            for node in tree.body
            if isinstance(node, ast.ClassDef) and bases(node, known_to(module, tree)) & found
        }
        if more <= found:
            return found
        found |= more


def bases(node, known):
    return {known.get(base.id) for base in node.bases if isinstance(base, ast.Name)}


PROVED = with_derived((name, one) for name, tree in TREES.items() for one in takes_integrity(tree)) - {
    ("ckptd.shared.protocol.messages", "NodeInfo"),  # tells of it
    ("ckptd.system.config", "Config"),
    ("ckptd_client._connect", "connect"),  # a user's
    ("ckptd_client._daemon.settings", "Proof"),
    ("ckptd.checkpoint.export.read", "SourceFile"),  # other programs' files have no digests
}
READERS = with_derived({("ckptd_client.dcp._reader", "CkptdReader")})  # an open client says how it is proved
CLIENT_RE = re.compile(r"(self\.)?_?client")


def says_nothing(module, tree):
    """Calls of what takes an integrity that name none.

    A file layer that is made for one call, ``FileLayer().size(path)``, proves nothing by itself, and nobody gets it.
    """
    once = {node.func.value for node in ast.walk(tree) if isinstance(node, ast.Call) and hasattr(node.func, "value")}
    for node, name, called in calls(module, tree):
        if called not in PROVED or (called[1] == "FileLayer" and node in once):
            continue
        given = [ast.unparse(value) for value in (*node.args, *(keyword.value for keyword in node.keywords))]
        by_client = called in READERS and any(map(CLIENT_RE.fullmatch, given))
        if not by_client and not any(map(SAYS_WHICH.search, given)):
            yield f"{name}, line {node.lineno}"


def calls(module, tree):
    """(call, as it is written, where that is defined): of names, of names in modules, and of a base's __init__."""
    known = known_to(module, tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for base in sorted(filter(None, bases(node, known))):
                inits = [call for call in ast.walk(node) if is_call_of(call, "super().__init__")]
                yield from ((call, "super().__init__", base) for call in inits)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known:
            yield node, node.func.id, known[node.func.id]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of = known.get(ast.unparse(node.func.value))
            if of is not None and ".".join(of) in TREES:
                yield node, ast.unparse(node.func), defined(".".join(of), node.func.attr)


def is_call_of(node, text):
    return isinstance(node, ast.Call) and ast.unparse(node.func) == text


def test_only_names_are_digests_without_integrity():
    """Who proves bytes is given an Integrity: then no key can be forgotten on the way."""
    assert {name for name, tree in TREES.items() if {"digest", "Digest"} & unkeyed(tree)} <= NAMES_BY_DIGEST


def unkeyed(tree):
    """What a file imports of the digests without a key."""
    found = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module == "ckptd.shared.format.digest"]
    return {alias.name for node in found for alias in node.names}


@pytest.mark.parametrize("module", EVERYTHING)
def test_whoever_proves_bytes_says_how(module):
    assert list(says_nothing(module, TREES[module])) == []


def test_the_rule_of_proofs_catches():
    head = "from ckptd.shared.format.manifest import decode_vote\n"
    assert list(says_nothing("x", ast.parse(head + "decode_vote(raw, where=where)"))) == ["decode_vote, line 2"]
    assert list(says_nothing("x", ast.parse(head + "decode_vote(raw, where=where, integrity=fs.integrity)"))) == []
    head = "from ckptd.store.files import FileLayer\n"
    assert list(says_nothing("x", ast.parse(head + "fs = FileLayer(top)"))) == ["FileLayer, line 2"]
    assert list(says_nothing("x", ast.parse(head + "fs = FileLayer(top, integrity)\nFileLayer().size(path)"))) == []
    head = "from ckptd_client.dcp import CkptdReader\n"
    assert list(says_nothing("x", ast.parse(head + "CkptdReader(path)"))) == ["CkptdReader, line 2"]
    assert list(says_nothing("x", ast.parse(head + "CkptdReader(client, step=3)"))) == []
    derived = "class Mine(CkptdReader):\n    def __init__(self, one):\n        super().__init__({})"
    assert list(says_nothing("x", ast.parse(head + derived.format("path")))) == ["super().__init__, line 4"]
    assert list(says_nothing("x", ast.parse(head + derived.format("path, integrity=self.integrity")))) == []
    head = "from ckptd_client.integrations._kit.dcp_reader import CachedReader as Reader\n"
    assert list(says_nothing("x", ast.parse(head + "Reader(origin.path)"))) == ["Reader, line 2"]
    head = "from ckptd_client import _checkpoint\n"
    assert list(says_nothing("x", ast.parse(head + "_checkpoint.open_directory(path)"))) == [
        "_checkpoint.open_directory, line 2"
    ]
    assert {("ckptd.store.files", "FileLayer"), ("ckptd.shared.files.regular", "RegularFiles")} <= PROVED
    assert len(PROVED) > 40


# --- documents ---

DOCUMENTS = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if path.exists()]
PATH_RE = re.compile(
    r"^(?:ckptd|client|ckptd_client|tests|docs|systemd|deploy|bench|scripts|\.ci)/[\w./@-]*(?:::\w+)?$"
)
NAME_RE = re.compile(r"^ckptd(?:_client)?(?:\.\w+)+(?:\(\))?$")
FILES_OF_USERS = {"ckptd.manifest", "ckptd.sock", "ckptd.log", "ckptd.service"}  # look like modules, are file names


def quoted(text):
    """What stands in single backticks, outside fenced blocks."""
    text = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)
    return set(re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text))


def path_exists(quote):
    name, _, test = quote.partition("::")
    path = next((base / name for base in (ROOT, ROOT / "client") if (base / name).exists()), None)
    return path is not None and (not test or f"def {test}(" in path.read_text())


def name_exists(quote):
    """Whether a dotted name is a module, or something that the longest module in it defines or imports."""
    parts = quote.removesuffix("()").split(".")
    for cut in range(len(parts), 0, -1):
        module = EVERYTHING.get(".".join(parts[:cut]))
        if module is not None:
            return defines(ast.parse(module.read_text()), parts[cut:])
    return False


def defines(tree, names):
    if not names:
        return True
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == names[0]:
            return len(names) == 1 or (isinstance(node, ast.ClassDef) and defines(node, names[1:]))
        if names[0] in bound_names(node):
            return True
    return False


def bound_names(node):
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_name_what_exists(document):
    quotes = quoted(document.read_text())
    missing = [quote for quote in quotes if PATH_RE.match(quote) and not path_exists(quote)]
    names = [quote for quote in quotes if NAME_RE.match(quote) and quote not in FILES_OF_USERS]
    assert sorted(missing + [quote for quote in names if not name_exists(quote)]) == []


def test_each_decision_is_listed():
    listed = set(re.findall(r"\(decisions/(\S+\.md)\)", (ROOT / "docs" / "README.md").read_text()))
    assert listed == {path.name for path in (ROOT / "docs" / "decisions").glob("*.md")}


def test_every_complaint_has_a_test():
    """In the last column; a name that is none is found by the test above."""
    rows = re.findall(r"^\| .*\|$", (ROOT / "docs" / "complaints.md").read_text(), flags=re.MULTILINE)
    bare = [row for row in rows if "::test_" not in row.split("|")[-2] and row.split("|")[-2].strip() != "test"]
    assert bare == []
    assert len(rows) > 50


def test_the_resolver_can_say_no():
    assert path_exists("ckptd/arena/budget.py")
    assert path_exists("ckptd_client/py.typed")
    assert path_exists("tests/unit/test_architecture.py::test_import_rule")
    assert not path_exists("tests/unit/test_architecture.py::test_nothing")
    assert not path_exists("ckptd/nothing.py")
    assert name_exists("ckptd.arena.budget")
    assert name_exists("ckptd.arena.budget.Budget.tightest")
    assert name_exists("ckptd.system.config.load_config()")
    assert not name_exists("ckptd.arena.budget.nothing")
    assert not name_exists("ckptd.nothing")
    assert quoted("a `b` ``c``\n```\n`d`\n```\n") == {"b"}
