"""Functions and classes that prove bytes are given an Integrity by each caller: no key can be forgotten on the way."""

import ast
import functools
import re

import pytest

from tests.unit.sources import EVERYTHING, trees

pytestmark = [pytest.mark.xdist_group("sources"), pytest.mark.seconds]  # one parse of all of them

# Of names, numbers and what one machine's processes agree on; no byte of a checkpoint is proved by them.
NAMES_BY_DIGEST = {
    "ckptd.parity.record",  # the name of a set
    "ckptd.shared.format.integrity",
    "ckptd.shared.format.arena_paths",
    "ckptd.shared.format.set_places",  # the name of a set's directory
    "ckptd.shared.format.stored_records",  # of a manifest, for the ranks of a shared read to compare
    "ckptd_client._state.replica_slices",
    "ckptd_client._load.shared_read.found",
    "ckptd_client._load.shared_read.meeting",
    "ckptd_client._load.shared_read.node_group",
    "ckptd.shared.torchfile.image",
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


def has(tree):
    """What a file knows by a name of one word, its own and what it imports, and where that comes from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, (node.module, alias.name)) for alias in node.names)


@functools.cache
def known():
    """What each file of ours knows by a name."""
    return {name: dict(has(tree)) for name, tree in trees().items()}


def defined(module, name):
    """Where a name of a module is defined: packages give on what they import."""
    while module in known() and name in known()[module]:
        module, name = known()[module][name]
    return module, name


@functools.cache
def known_to(module, tree):
    """All one-word names of a file that stand for something of ours, and where those are defined."""
    own = {node.name: (module, node.name) for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    return own | {name: defined(*of) for name, of in has(tree)}


@functools.cache
def classes():
    """Where each class is defined, and its bases."""
    return {
        (module, node.name): bases(node, known_to(module, tree))
        for module, tree in trees().items()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


def with_derived(found):
    """And all classes that derive from these: they take what their bases take, also where they say nothing of it."""
    found = set(found)
    while True:
        more = {name for name, of in classes().items() if of & found}
        if more <= found:
            return found
        found |= more


def bases(node, known):
    return {known.get(base.id) for base in node.bases if isinstance(base, ast.Name)}


NOT_PROVED = {
    ("ckptd.shared.protocol.messages", "NodeInfo"),  # tells of it
    ("ckptd.shared.settings.config", "Config"),
    ("ckptd_client._connect", "connect"),  # a user's
    ("ckptd_client._daemon.settings", "Proof"),
    ("ckptd.checkpoint.export.read", "SourceFile"),  # other programs' files have no digests
}


@functools.cache
def proved():
    """What takes an integrity."""
    return with_derived((name, one) for name, tree in trees().items() for one in takes_integrity(tree)) - NOT_PROVED


@functools.cache
def readers():
    """An open client says how it is proved."""
    return with_derived({("ckptd_client.dcp._reader", "CkptdReader")})


CLIENT_RE = re.compile(r"(self\.)?_?client")


def says_nothing(module, tree):
    """Calls of what takes an integrity that name none.

    A file layer that is made for one call, ``FileLayer().size(path)``, proves nothing by itself, and nobody gets it.
    """
    once = {node.func.value for node in ast.walk(tree) if isinstance(node, ast.Call) and hasattr(node.func, "value")}
    for node, name, called in calls(module, tree):
        if called not in proved() or (called[1] == "FileLayer" and node in once):
            continue
        given = [ast.unparse(value) for value in (*node.args, *(keyword.value for keyword in node.keywords))]
        by_client = called in readers() and any(map(CLIENT_RE.fullmatch, given))
        if not by_client and not any(map(SAYS_WHICH.search, given)):
            yield f"{name}, line {node.lineno}"


def calls(module, tree):
    """(call, as it is written, where that is defined): of names, of names in modules, and of a base's __init__."""
    names = known_to(module, tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for base in sorted(filter(None, bases(node, names))):
                inits = [call for call in ast.walk(node) if is_call_of(call, "super().__init__")]
                yield from ((call, "super().__init__", base) for call in inits)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            yield node, node.func.id, names[node.func.id]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of = names.get(ast.unparse(node.func.value))
            if of is not None and ".".join(of) in EVERYTHING:
                yield node, ast.unparse(node.func), defined(".".join(of), node.func.attr)


def is_call_of(node, text):
    return isinstance(node, ast.Call) and ast.unparse(node.func) == text


def test_only_names_are_digests_without_integrity():
    """Who proves bytes is given an Integrity: then no key can be forgotten on the way."""
    assert {name for name, tree in trees().items() if {"digest", "Digest"} & unkeyed(tree)} <= NAMES_BY_DIGEST


def unkeyed(tree):
    """What a file imports of the digests without a key."""
    found = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module == "ckptd.shared.format.digest"]
    return {alias.name for node in found for alias in node.names}


def test_a_proof_of_bytes_says_how():
    silent = {module: found for module, tree in trees().items() if (found := list(says_nothing(module, tree)))}
    assert silent == {}


def test_the_rule_of_proofs_catches():
    head = "from ckptd.shared.format.manifest import decode_vote\n"
    assert list(says_nothing("x", ast.parse(head + "decode_vote(raw, where=where)"))) == ["decode_vote, line 2"]
    assert list(says_nothing("x", ast.parse(head + "decode_vote(raw, where=where, integrity=fs.integrity)"))) == []
    head = "from ckptd.system.files import FileLayer\n"
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
    head = "from ckptd_client._load import checkpoint\n"
    assert list(says_nothing("x", ast.parse(head + "checkpoint.open_directory(path)"))) == [
        "checkpoint.open_directory, line 2"
    ]
    assert {("ckptd.system.files", "FileLayer"), ("ckptd.shared.stores.directory", "DirectoryFiles")} <= proved()
    assert len(proved()) > 40
