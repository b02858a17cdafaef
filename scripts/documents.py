"""Lists of the documents, made from the nav of mkdocs.yml and from the pages: docs/README.md, the decisions, llms.txt.

`python -m scripts.documents` writes them. A test compares: tests/unit/test_document_lists.py.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
# Pages of the site that are not below docs/, or have another name there.
ELSEWHERE = {
    "index.md": "README.md",
    "documents.md": "docs/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "deploy/README.md": "deploy/README.md",
    "systemd/README.md": "systemd/README.md",
}
COMMAND = ".venv/bin/python -m scripts.documents"
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")


@dataclass(frozen=True)
class Page:
    """A document: its path from the root of the repository, its heading, the first sentence below it."""

    path: str
    title: str
    summary: str


def source(site_path: str) -> str:
    """The file, from the root of the repository, of a page of the site."""
    return ELSEWHERE.get(site_path, f"docs/{site_path}")


def page(path: str) -> Page:
    """Reads a document. Its first paragraph begins with a sentence that says what is in it."""
    text = _FENCE.sub("", (ROOT / path).read_text(encoding="utf-8"))
    title = re.search(r"^# (.+)$", text, re.MULTILINE)
    if title is None:
        raise ValueError(f"{path} has no line '# title'")
    paragraph = text[title.end() :].strip().split("\n\n")[0].replace("\n", " ")
    plain = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", paragraph)
    sentence = re.match(r"[\w`].*?\.(?= |$)", plain)
    return Page(path, title[1].strip(), sentence[0] if sentence else "")


def sections() -> dict[str, list[Page]]:
    """The nav: name of the section, its pages."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    found = {name: [page(source(path)) for path in paths] for entry in nav for name, paths in entry.items()}
    if bare := [one.path for pages in found.values() for one in pages if not one.summary]:
        raise ValueError(f"{bare[0]}: below its heading stands no sentence that says what is on the page")
    return found


def decisions() -> list[Page]:
    """The pages of docs/decisions, by number."""
    return [page(f"docs/decisions/{path.name}") for path in sorted((ROOT / "docs/decisions").glob("0*.md"))]


def outputs() -> dict[str, str]:
    """Each file that is generated, and its text."""
    return {"docs/README.md": _contents(), "docs/decisions/README.md": _decisions(), "llms.txt": llms()}


def _contents() -> str:
    lines = ["# Documents", "", f"All pages, in the order of the site. `{COMMAND}` writes this list from `mkdocs.yml`."]
    for name, pages in sections().items():
        lines += ["", f"## {name}", ""]
        for one in pages:
            if one.path != "docs/README.md":
                target = one.path.removeprefix("docs/") if one.path.startswith("docs/") else f"../{one.path}"
                lines += wrapped(f"- [{one.title}]({target}): {one.summary}")
    return "\n".join(lines) + "\n"


def _decisions() -> str:
    lines = ["# Decisions", ""]
    lines += wrapped(
        "Choices that a later change may want to undo: problem, decision, price, and a reason to reverse it. "
        f"`{COMMAND}` writes this list from the titles.", indent=""
    )  # fmt: skip
    lines.append("")
    for one in decisions():
        number, _, decision = one.title.partition(": ")
        lines += wrapped(f"- [{number}]({Path(one.path).name}): {decision}")
    return "\n".join(lines) + "\n"


def llms(*, link: str = "") -> str:
    """llms.txt: the pages for language models, as https://llmstxt.org has it. link goes before each path."""
    readme = page("README.md")
    lines = ["# ckptd", "", f"> {readme.summary}", ""]
    lines.append("Each link is to the Markdown of a page. API pages name what the docstrings of `ckptd_client` say.")
    for name, pages in sections().items():
        lines += ["", f"## {name}", ""]
        lines += [f"- [{one.title}]({link}{one.path}): {one.summary}" for one in pages]
    return "\n".join(lines) + "\n"


def wrapped(text: str, *, width: int = 120, indent: str = "  ") -> list[str]:
    """Lines of at most width characters; a link is never cut."""
    words = re.findall(r"(?:\[[^\]]*\]\([^)]*\)|\S)+", text)
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + 1 + len(word) > width:
            lines.append(indent + word)
        else:
            lines[-1] += f" {word}"
    return lines


if __name__ == "__main__":
    for _ in range(2):  # the lists have the first sentences of each other
        for name, text in outputs().items():
            (ROOT / name).write_text(text, encoding="utf-8")
