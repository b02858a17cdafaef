"""Documents name files, tests and functions that exist."""

import ast
import re

from tests.unit.sources import EVERYTHING, ROOT

ELSEWHERE = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "deploy/README.md", "systemd/README.md"]
DOCUMENTS = [*(ROOT / name for name in ELSEWHERE), *sorted((ROOT / "docs").rglob("*.md"))]
PATH_RE = re.compile(
    r"^(?:ckptd|client|ckptd_client|tests|docs|systemd|deploy|bench|scripts|\.ci)/[\w./@-]*(?:::\w+)?$"
)
NAME_RE = re.compile(r"^ckptd(?:_client)?(?:\.\w+)+(?:\(\))?$")
FILES_OF_USERS = {"ckptd.sock", "ckptd.log", "ckptd.service"}  # look like modules, are file names


def quoted(text):
    """Each text in single backticks outside fenced blocks, and each path in a diagram."""
    diagrams = re.findall(r"^```mermaid\n.*?^```", text, flags=re.MULTILINE | re.DOTALL)
    named = {path for diagram in diagrams for path in re.findall(r"(?:ckptd|client)/[\w/]+\.py", diagram)}
    text = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)
    return named | set(re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text))


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


def test_documents_name_what_exists():
    missing = {}
    for document in set(DOCUMENTS) - {ROOT / "CHANGELOG.md"}:  # which names what was
        quotes = quoted(document.read_text())
        paths = [quote for quote in quotes if PATH_RE.match(quote) and not path_exists(quote)]
        names = [quote for quote in quotes if NAME_RE.match(quote) and quote not in FILES_OF_USERS]
        if found := sorted(paths + [quote for quote in names if not name_exists(quote)]):
            missing[document.name] = found
    assert missing == {}


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
    assert quoted("```mermaid\nA[a<br>ckptd/nothing.py] --> B\n```\n") == {"ckptd/nothing.py"}


def heads(document):
    """Anchors of a document, as its readers make them of its headings."""
    lines = re.findall(r"^#+ (.*)$", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-") for line in lines}


def links(document):
    """(file, anchor) of each link to a file of ours."""
    text = re.sub(r"^(```|~~~).*?^\1", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not link.startswith("http"):
            name, _, anchor = link.partition("#")
            yield (document.parent / name if name else document), anchor


def test_links_lead_somewhere():
    dead = [
        f"{document.name}: {target.name}#{anchor}"
        for document in DOCUMENTS
        for target, anchor in links(document)
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in heads(target))
    ]
    assert dead == []
    assert len([link for document in DOCUMENTS for link in links(document)]) > 100


def test_versions_in_documents_are_those_of_the_code():
    text = " ".join((ROOT / "docs" / name).read_text() for name in ("format.md", "protocol.md"))
    told = {
        "ckptd.shared.format.sealed_record": re.findall(r"and `version` (\d+)|COMMITTED \| `format` (\d+)", text),
        "ckptd.shared.format.layout": re.findall(r"\| layout, leaves \| (\d+) ()", text),
        "ckptd.shared.protocol.messages": re.findall(r"carries `version`, (\d+)()", text),
        "ckptd.peers.packets": re.findall(r"release, path\]`. Version is (\d+)()", text),
        "ckptd.store.messages": re.findall(r"\*\*Version.\*\* It is (\d+)()", text),
    }
    for module, found in told.items():
        (version,) = re.findall(r"^VERSION = (\d+)", EVERYTHING[module].read_text(), flags=re.MULTILINE)
        assert {"".join(one) for one in found} == {version}, module


def test_the_first_page_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


def test_lines_are_short():
    """Rows of tables cannot be broken."""
    named = [(document.name, line) for document in DOCUMENTS for line in document.read_text().splitlines()]
    assert [(name, line) for name, line in named if len(line) > 120 and not line.lstrip().startswith("|")] == []
