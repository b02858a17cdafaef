"""Code in documents works: a test runs each program, and each call, command and variable in the text exists.

The programs themselves are run where their parts are: tests/interop/test_documents.py, tests/frameworks.
"""

import ast
import builtins
import inspect
import re
import shlex

import click
import pytest
import torch.distributed.checkpoint as dcp

import ckptd_client
import ckptd_client.dcp
from ckptd.cli import cli
from ckptd.shared.settings.variables import FOREIGN_VARIABLES, SETTING_VARIABLES
from tests.unit.sources import ROOT
from tests.unit.test_document_names import DOCUMENTS

# Each Python block, by document and heading, and the test that runs it as it stands there.
RUN_BY = {
    "README.md: A first save": "tests/interop/test_documents.py",
    "docs/client.md: Whole weights": "tests/interop/test_documents.py",
    "docs/dcp.md: A complete example": "tests/interop/test_documents.py",
    "docs/files.md: A complete example": "tests/interop/test_documents.py",
    "docs/integrations.md: A complete example": "tests/interop/test_documents.py",
    "docs/history.md: Where the time went": "tests/interop/test_documents.py",
    "docs/operations.md: Before it is killed": "tests/interop/test_documents.py",
    "docs/readers.md: Five ways": "tests/interop/test_documents.py",
    "docs/deepspeed.md: A complete example": "tests/frameworks/test_documents.py",
    "docs/lightning.md: A complete example": "tests/frameworks/test_documents.py",
    "docs/lightning.md: FSDP2: a complete example": "tests/frameworks/test_documents.py",
    "docs/huggingface.md: Trainer": "tests/frameworks",
    "docs/huggingface.md: Accelerate": "tests/frameworks",
    "docs/megatron.md: A complete example": "tests/frameworks/test_megatron.py",
}
# Blocks that are a part of a program of the reader's, the names that they take from it, and the test of what they show.
FRAGMENTS = {
    "docs/deepspeed.md: A ZeRO checkpoint in other shapes": (
        {"model", "optimizer", "OUT"},
        "tests/unit/checkpoint/test_export_zero.py",
    ),
}
CHECKED = [path for path in DOCUMENTS if path.name != "CHANGELOG.md"]  # which names what was
OBJECTS = {
    "ckptd_client": ckptd_client,
    "client": ckptd_client.Client,
    "handle": ckptd_client.SaveHandle,
    "writer": ckptd_client.dcp.CkptdWriter,
    "reader": ckptd_client.dcp.CkptdReader,
    "restored": ckptd_client.Restored,
    "files": ckptd_client.RestoredFiles,
    "dcp": dcp,
}
BARE = {**{name: getattr(ckptd_client, name) for name in ckptd_client.__all__}, **vars(ckptd_client.dcp)}
NO_COMMAND = {"ckptd VERB --help", "ckptd 2026-11-23 integrity: "}


def blocks(document):
    """(heading, code) of each Python block."""
    text = document.read_text()
    for block in re.finditer(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        yield re.findall(r"^#+ (.+)$", text[: block.start()], flags=re.MULTILINE)[-1], block[1]


PROGRAMS = {f"{path.relative_to(ROOT)}: {head}": code for path in CHECKED for head, code in blocks(path)}


def test_a_test_runs_each_program():
    assert set(PROGRAMS) == set(RUN_BY) | set(FRAGMENTS)
    assert sum(1 for path in CHECKED for _ in blocks(path)) == len(PROGRAMS)
    for place, tests in RUN_BY.items():
        document, _, heading = place.partition(": ")
        files = [ROOT / tests] if tests.endswith(".py") else sorted((ROOT / tests).glob("*.py"))
        texts = [path.read_text() for path in files]
        assert any(f'"{heading}"' in text for text in texts), f"{place}: {tests} does not run it"
        assert any(f'"{document}"' in text or document in text for text in texts), place
    assert all((ROOT / tests).exists() for _, tests in FRAGMENTS.values())


@pytest.mark.parametrize("place", PROGRAMS)
def test_a_program_defines_what_it_uses(place):
    assert undefined(PROGRAMS[place]) == FRAGMENTS.get(place, (set(), ""))[0]


def undefined(code):
    """Names that a program reads and never binds."""
    bound = set(dir(builtins)) | {"__name__"}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.add(node.id)
    return {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)} - bound


def test_what_a_program_lacks_is_found():
    assert undefined("import a.b\nfor c in d:\n    def f(e): return a, c, e, g\n") == {"d", "g"}


# --- calls in the text


def inline(document):
    """The text in single backticks, outside fenced blocks."""
    text = re.sub(r"^(```|~~~).*?^\1", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [" ".join(quote.split()) for quote in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]


def wrong_calls(code):
    """Calls of ckptd's in an expression or a program that name nothing, or an argument that there is not."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = named(node.func)
            if function is None:
                found.append(ast.unparse(node.func))
            elif function is not UNKNOWN:
                taken = inspect.signature(function).parameters.values()
                names = {one.name for one in taken}
                if not any(one.kind is one.VAR_KEYWORD for one in taken):
                    found += [
                        f"{ast.unparse(node.func)}({w.arg}=)" for w in node.keywords if w.arg not in {None, *names}
                    ]
    return found


UNKNOWN = object()


def named(node):
    """The function that is meant; None: no such; UNKNOWN: not one of ours."""
    if isinstance(node, ast.Name):
        return BARE.get(node.id, UNKNOWN)
    parts = ast.unparse(node).split(".")
    if parts[0] not in OBJECTS or not all(part.isidentifier() for part in parts):
        return UNKNOWN
    found = OBJECTS[parts[0]]
    for part in parts[1:]:
        found = getattr(found, part, None)
    return found


def test_calls_in_documents_exist():
    codes = [(path.name, code) for path in CHECKED for code in [*inline(path), *(code for _, code in blocks(path))]]
    assert [(name, wrong) for name, code in codes for wrong in wrong_calls(code)] == []
    assert sum("client.save(" in code for _, code in codes) >= 8


def test_a_wrong_call_is_found():
    assert wrong_calls('connect(..., redundance="xor")') == ["connect(redundance=)"]
    assert wrong_calls("client.safe(state)") == ["client.safe"]
    assert wrong_calls("ckptd_client.dcp.CkptdReader(directory)") == wrong_calls("torch.load(x)") == []


# --- commands


def commands(document):
    """Each command line of ckptd's, of make and of python -m: inline, in indented and in fenced blocks."""
    text = document.read_text()
    lines = re.findall(r"^    (?:\$ )?(.+)$", text, flags=re.MULTILINE)
    for block in re.findall(r"^```(?:sh|console)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        lines += block.split("\n")
    for line in [*lines, *inline(document)]:
        for part in re.split(r"\s*(?:&&|\|\||[;|])\s*", line.partition("  #")[0]):
            typed = re.sub(r"^(?:sudo |[A-Z_]+=\S+ |\S*/bin/)+", "", part)
            if re.match(r"(?:ckptd [a-z]|make [a-z-]+|python3? -m )", typed):
                yield typed


def wrong_command(line):
    """Why it cannot be typed; empty: it can."""
    try:
        words = shlex.split(re.sub(r"\[[^\]]*\]|\.\.\.?|[<>]\S*", " X ", line))
    except ValueError:
        return ""
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        return "" if words[1] in targets else "no such target"
    if words[0] != "ckptd":
        ours = words[2].partition(".")[0] in {"ckptd", "ckptd_client", "tests", "bench", "scripts"}
        places = [base / words[2].replace(".", "/") for base in (ROOT, ROOT / "client")]
        found = any(place.is_dir() or place.with_suffix(".py").is_file() for place in places)
        return "no such module" if ours and not found else ""
    command = cli.get_command(click.Context(cli), words[1])
    if command is None:
        return "no such verb"
    try:
        _, left, _ = command.make_parser(click.Context(command)).parse_args(args=words[2:])
    except click.UsageError as error:
        return str(error)
    return f"too many arguments: {left}" if left else ""


def test_commands_in_documents_can_be_typed():
    lines = [(path.name, line) for path in CHECKED for line in commands(path) if line not in NO_COMMAND]
    assert [(name, line, why) for name, line in lines if (why := wrong_command(line))] == []
    assert len(lines) > 100


BARE_MODULE = re.compile(r"(?<![\w/])python3?\s+-m\s+(?:tests|scripts|bench)\b[\w.]*")


def test_our_modules_are_run_by_the_python_that_make_installs():
    """In a fresh clone no other has what they need, and there may be no command `python` at all."""
    assert [(path.name, bare) for path in CHECKED for bare in BARE_MODULE.findall(path.read_text())] == []


def test_a_bare_module_is_found():
    assert BARE_MODULE.findall("`python\n  -m bench.late` and .venv/bin/python -m bench") == ["python\n  -m bench.late"]


@pytest.mark.parametrize(
    "line", ["ckptd lst /x", "ckptd status --node", "ckptd list /x /y", "make tests", "python -m bench.none"]
)
def test_a_wrong_command_is_found(line):
    assert wrong_command(line)


def test_variables_in_documents_exist():
    known = {*SETTING_VARIABLES, *FOREIGN_VARIABLES}
    named = {(path.name, name) for path in CHECKED for name in re.findall(r"\bCKPTD_[A-Z_]+[A-Z]\b", path.read_text())}
    assert sorted((place, name) for place, name in named if name not in known) == []
