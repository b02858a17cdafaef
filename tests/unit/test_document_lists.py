"""The lists of documents are complete: the nav, docs/README.md, the decisions, llms.txt, the API pages."""

import ast
import re

from scripts.documents import COMMAND, ROOT, decisions, outputs, sections, wrapped
from tests.unit.sources import EVERYTHING


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


def public_names(module):
    for node in ast.parse(EVERYTHING[module].read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return {f"{module}.{name}" for name in ast.literal_eval(node.value) if name != "__version__"}
    return set()


def test_the_api_pages_have_every_public_name():
    text = "".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    shown = re.findall(r"^::: (\S+)$", text, flags=re.MULTILINE)
    assert len(shown) == len(set(shown))
    public = public_names("ckptd_client") | public_names("ckptd_client.dcp")
    assert {name for name in shown if not name.startswith("ckptd_client.integrations.")} == public
    modules = {path.stem for path in (ROOT / "client/ckptd_client/integrations").glob("[a-z]*.py")}
    assert {name.split(".")[2] for name in shown if name.startswith("ckptd_client.integrations.")} == modules


def test_a_long_line_is_wrapped_and_a_link_is_not():
    lines = wrapped("- [a b c](d.md): " + "word " * 30, width=40)
    assert max(map(len, lines)) <= 40
    assert lines[0].startswith("- [a b c](d.md):")
