"""The lists of documents are complete: the nav, docs/README.md, the decisions, llms.txt, the API pages."""

import ast
import importlib
import inspect
import pydoc
import re

import pytest

from scripts.documents import COMMAND, ROOT, decisions, outputs, sections, wrapped
from tests.unit.sources import EVERYTHING
from tests.unit.test_document_names import DOCUMENTS


def test_generated_lists_are_up_to_date():
    stale = [name for name, text in outputs().items() if (ROOT / name).read_text() != text]
    assert stale == [], f"run {COMMAND}"


def test_the_nav_has_every_page():
    listed = {page.path for pages in sections().values() for page in pages}
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}
    assert listed & pages == pages - {page.path for page in decisions()}


def test_a_decision_has_a_number_of_its_own_and_a_title_that_is_a_sentence():
    found = [(page.path, re.match(r"(\d{4}): .+ .+ .+", page.title)) for page in decisions()]
    assert [path for path, title in found if title is None or f"/{title[1]}-" not in path] == []
    assert len({path.split("-")[0] for path, _ in found}) == len(found) > 40


GLOSSARY = ROOT / "docs" / "glossary.md"
ASKED_FOR = (  # terms that users met in messages and pages without an explanation
    "arena", "committed", "coordinator", "drain", "durable", "group", "incarnation", "job", "member", "node", "parity",
    "protected", "published", "rank", "run", "sealed", "slot", "staged",
)  # fmt: skip


def test_the_glossary_has_each_term_in_one_line_in_the_order_of_the_alphabet():
    lines = GLOSSARY.read_text().partition("\n- ")[2].splitlines()
    terms = [re.match(r"(?:- )?\*\*([a-z]+)\*\*: .+\.$", line) for line in lines]
    assert all(terms), [line for line, term in zip(lines, terms, strict=True) if not term]
    assert [term[1] for term in terms] == sorted({term[1] for term in terms})
    assert {term[1] for term in terms} >= set(ASKED_FOR)


def test_each_term_of_the_glossary_is_used_in_other_documents():
    others = " ".join(path.read_text() for path in DOCUMENTS if path != GLOSSARY)
    terms = re.findall(r"\*\*([a-z]+)\*\*: ", GLOSSARY.read_text())
    assert [term for term in terms if not re.search(rf"\b{term}s?\b", others)] == []


def test_the_first_pages_that_use_the_terms_link_to_the_glossary():
    pages = ("README.md", *(f"docs/{name}.md" for name in ("client", "operations", "failures", "status")))
    assert [page for page in pages if "glossary.md)" not in (ROOT / page).read_text()] == []


def public_names(module):
    for node in ast.parse(EVERYTHING[module].read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return {f"{module}.{name}" for name in ast.literal_eval(node.value) if name != "__version__"}
    return set()


def shown():
    """Names on the API pages."""
    text = "".join(path.read_text() for path in sorted((ROOT / "docs" / "api").glob("*.md")))
    return re.findall(r"^::: (\S+)$", text, flags=re.MULTILINE)


def test_the_api_pages_have_every_public_name():
    names = shown()
    assert len(names) == len(set(names))
    public = public_names("ckptd_client") | public_names("ckptd_client.dcp")
    assert {name for name in names if not name.startswith("ckptd_client.integrations.")} == public
    modules = {path.stem for path in (ROOT / "client/ckptd_client/integrations").glob("[a-z]*.py")}
    assert {name.split(".")[2] for name in names if name.startswith("ckptd_client.integrations.")} == modules


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "api").glob("*.md")), ids=lambda path: path.stem)
def test_an_api_page_says_how_to_read_it_without_the_site(path):
    (line,) = [line for line in path.read_text().splitlines() if line.startswith("Without the site")]
    assert len(line) <= 120
    (module,) = re.findall(r"`python -m pydoc ([\w.]+)`", line)
    shown_by_pydoc = pydoc.plain(pydoc.render_doc(module))
    listed = re.findall(r"^::: (\S+)$", path.read_text(), flags=re.MULTILINE)
    names = [name for name in listed if name.startswith(module)]
    assert names
    for name in names:
        assert re.search(rf"\b{name.rpartition('.')[2]}\b", shown_by_pydoc), name
    for name in re.findall(r"`help\(([\w.]+)\)`", line):
        assert name in names


def test_a_long_line_is_wrapped_and_a_link_is_not():
    lines = wrapped("- [a b c](d.md): " + "word " * 30, width=40)
    assert max(map(len, lines)) <= 40
    assert lines[0].startswith("- [a b c](d.md):")


def documented():
    """(name, object) of each function, class and public method on the API pages that has arguments."""
    for name in shown():
        module, _, last = name.rpartition(".")
        found = getattr(importlib.import_module(module), last)
        if not inspect.isclass(found) or re.search(
            "Args:|Attributes:", inspect.getdoc(found) or ""
        ):  # one that users make
            yield name, found
        if inspect.isclass(found) and not issubclass(found, Exception):
            methods = {n: m for base in found.__mro__ for n, m in vars(base).items() if inspect.isfunction(m)}
            yield from ((f"{name}.{n}", m) for n, m in methods.items() if not n.startswith("_") and ours(m))


def ours(function):
    return function.__module__ in ("ckptd_client.client", "ckptd_client._preempt.preemption", "ckptd_client.files")


def undocumented(found):
    """Arguments that the docstring does not name."""
    taken = [
        one
        for one in inspect.signature(found).parameters.values()
        if one.kind != one.VAR_KEYWORD and one.name != "args"
    ]
    names = [one.name for one in taken if one.name != "self" and not one.name.startswith("_")]
    return [name for name in names if not re.search(rf"\b{name}\b", inspect.getdoc(found) or "")]


def test_docstrings_of_the_api_name_every_argument():
    missing = {name: lacking for name, found in documented() if (lacking := undocumented(found))}
    assert missing == {}


def test_an_argument_that_is_not_documented_is_found():
    def function(first, second):
        """Adds first."""

    assert undocumented(function) == ["second"]
