"""What mkdocs does with the documents beyond its own: pages outside docs/, links to files, diagrams, llms.txt."""

import os
import posixpath
import re
from pathlib import Path
from typing import Any

import mermaidx
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from scripts.documents import ELSEWHERE, LINK, ROOT, llms, sections, source

_DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(^```.*?^```|`[^`\n]*`)", re.MULTILINE | re.DOTALL)
_FETCHED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(?:https?:)?//|<link\b[^>]*\bhref=\"?(?:https?:)?//"
)
_PRIVATE = re.compile(r'<h\d id="([\w.]+\._\w+)"')
_SITE_OF = {path: site for site, path in ELSEWHERE.items()}


def on_config(config: Any) -> None:
    """Anchors of headings are those that GitHub makes: a link works on both."""
    config.mdx_configs["toc"]["slugify"] = lambda text, _: (
        re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")
    )


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are not below docs/, and the files of the repository that pages link to."""
    files.remove(files.get_file_from_path("README.md"))
    for site, path in ELSEWHERE.items():
        files.append(File.generated(config, site, abs_src_path=str(ROOT / path)))
    for file in list(files.documentation_pages()):
        for target in _targets(file.src_uri, Path(file.abs_src_path).read_text(encoding="utf-8")):
            if (ROOT / target).is_file() and files.get_file_from_path(_site_path(target)) is None:
                files.append(File.generated(config, _site_path(target), abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links lead to pages of the site; a diagram is drawn from its source."""
    here = page.file.src_uri
    parts = _CODE.split(markdown)
    parts[::2] = [LINK.sub(lambda link: _rewritten(here, link[1]), part) for part in parts[::2]]
    return _DIAGRAM.sub(lambda block: _drawn(here, block[1]), "".join(parts))


def on_post_build(config: Any) -> None:
    """Writes llms.txt and llms-full.txt. Raises PluginError for a page that needs the network or has a private name."""
    site = Path(config.site_dir)
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        if fetched := _FETCHED.search(text):
            raise PluginError(f"{path.relative_to(site)} needs the network: {fetched[0]}")
        if private := _PRIVATE.search(text):
            raise PluginError(f"{path.relative_to(site)} shows the private name {private[1]}")
    pages = [page for group in sections().values() for page in group]
    (site / "llms.txt").write_text(llms(), encoding="utf-8")
    texts = [f"<!-- {page.path} -->\n\n{(ROOT / page.path).read_text(encoding='utf-8')}" for page in pages]
    (site / "llms-full.txt").write_text("\n\n".join(texts), encoding="utf-8")
    for page in pages:  # where the links of llms.txt lead
        copy = site / page.path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text((ROOT / page.path).read_text(encoding="utf-8"), encoding="utf-8")


def _targets(here: str, markdown: str) -> list[str]:
    """Files of the repository that a page links to."""
    links = [link for part in _CODE.split(markdown)[::2] for link in LINK.findall(part)]
    return [_target(here, link) for link in links if not link.startswith(("http", "#"))]


def _target(here: str, link: str) -> str:
    """The path from the root of the repository that a link on a page means; of a folder, its README.md."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source(here)), link.partition("#")[0]))
    return posixpath.join(path, "README.md") if os.path.isfile(ROOT / path / "README.md") else path


def _site_path(path: str) -> str:
    return _SITE_OF.get(path, path.removeprefix("docs/"))


def _rewritten(here: str, link: str) -> str:
    if link.startswith(("http", "#")):
        return link
    anchor = link.partition("#")[2]
    path = posixpath.relpath(_site_path(_target(here, link)), posixpath.dirname(here) or ".")
    return f"{path}#{anchor}" if anchor else path


def _drawn(here: str, text: str) -> str:
    try:
        svg = mermaidx.render(text).svg()
    except RuntimeError as error:
        raise PluginError(f"{here} has a diagram that mermaid does not take: {error}") from error
    return f'<div class="diagram">{" ".join(svg.split())}</div>'
