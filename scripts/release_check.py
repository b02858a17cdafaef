"""Whether a release can be made of this checkout: ``python -m scripts.release_check [--draft]``, or make release-check.

Versions and needs are equal wherever they stand, the changelog has notes for the version, the sdist and the wheel can
be built, and the sdist makes the same wheel. Writes all to build/release. --draft: "unreleased" is no problem.
"""

import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "release"
_VERSION_RE = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
_HEADING_RE = re.compile(r"^## (\S+) \((unreleased|\d{4}-\d{2}-\d{2})\)$", re.MULTILINE)
_IMAGE_RE = re.compile(r"\bckptd:(\d+\.\d+\.\d+\S*)")
_NEED_RE = re.compile(r"^([A-Za-z0-9_-]+)\s*(.*)$")
_CONDA_NAMES = {"msgpack": "msgpack-python", "prometheus-client": "prometheus_client", "xxhash": "python-xxhash"}


def version_of(root: Path) -> str:
    """What the packages say."""
    return _found(_VERSION_RE, root / "ckptd/__init__.py")[0]


def versions(root: Path) -> Iterator[tuple[str, str]]:
    """(file, version) of each place that has one."""
    yield "ckptd/__init__.py", version_of(root)
    yield "CHANGELOG.md", _found(_HEADING_RE, root / "CHANGELOG.md")[0][0]
    yield "deploy/conda/recipe.yaml", _recipe(root)["context"]["version"]
    for path in sorted((root / "deploy").rglob("*")):
        if path.is_file():
            for version in _IMAGE_RE.findall(path.read_text(encoding="utf-8")):
                yield str(path.relative_to(root)), version


def needs(root: Path) -> tuple[dict[str, str], dict[str, str]]:
    """What is needed at run time, by name as conda has it: of pyproject.toml, and of the recipe."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ours = dict(_need(text) for text in project["dependencies"]) | {"python": project["requires-python"]}
    theirs = dict(_need(text) for text in _recipe(root)["requirements"]["run"] if not text.startswith("__"))
    return {_CONDA_NAMES.get(name, name): bound for name, bound in ours.items()}, theirs


def notes_of(changelog: str) -> tuple[str, str, str]:
    """Version, date or "unreleased", and text of the newest section. Raises ValueError where there is none."""
    heading = _HEADING_RE.search(changelog)
    if heading is None:
        raise ValueError("CHANGELOG.md has no heading such as '## 0.1.0 (2026-01-31)'")
    rest = changelog[heading.end() :]
    following = re.search(r"^## ", rest, re.MULTILINE)
    return heading[1], heading[2], rest[: following.start() if following else None].strip()


def problems(root: Path, *, draft: bool = False) -> list[str]:
    """What is to be mended before a release, without building anything."""
    found = []
    version = version_of(root)
    found += [f"{place}: {other}, not {version}" for place, other in versions(root) if other != version]
    ours, theirs = needs(root)
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            found.append(f"deploy/conda/recipe.yaml: {name} {theirs.get(name)}, pyproject.toml has {ours.get(name)}")
    _, date, notes = notes_of((root / "CHANGELOG.md").read_text(encoding="utf-8"))
    if not notes:
        found.append("CHANGELOG.md: nothing stands under the version")
    if date == "unreleased" and not draft:
        found.append(f"CHANGELOG.md: '## {version} (unreleased)': give the date, or make release-check DRAFT=1")
    return found


def build(root: Path, out: Path) -> list[str]:
    """Builds both distributions; what is wrong with them."""
    out.mkdir(parents=True, exist_ok=True)
    for old in [*out.glob("*.whl"), *out.glob("*.tar.gz")]:
        old.unlink()
    _hatchling(root, out, "sdist", "wheel")
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as work:
        with tarfile.open(sdist) as archive:
            archive.extractall(work, filter="data")
        (unpacked,) = Path(work).iterdir()
        _hatchling(unpacked, Path(work), "wheel")
        (again,) = Path(work).glob("*.whl")
        ours, theirs = _content(wheel), _content(again)
    differing = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    found = [f"{sdist.name} makes another wheel: {name}" for name in differing]
    version = version_of(root)
    found += [f"{one.name} is not of version {version}" for one in (wheel, sdist) if f"-{version}" not in one.name]
    return found


def _hatchling(root: Path, out: Path, *targets: str) -> None:
    which = [word for target in targets for word in ("-t", target)]
    subprocess.run([sys.executable, "-m", "hatchling", "build", *which, "-d", str(out)], cwd=root, check=True)


def _content(wheel: Path) -> dict[str, int]:
    with zipfile.ZipFile(wheel) as archive:
        return {one.filename: one.CRC for one in archive.infolist()}


def _recipe(root: Path) -> dict[str, dict[str, list[str]]]:
    return yaml.safe_load((root / "deploy/conda/recipe.yaml").read_text(encoding="utf-8"))


def _need(text: str) -> tuple[str, str]:
    name, bound = _NEED_RE.fullmatch(text).groups()
    return name, bound


def _found(pattern: re.Pattern[str], path: Path) -> list[str]:
    found = pattern.findall(path.read_text(encoding="utf-8"))
    if not found:
        raise ValueError(f"{path} has no version")
    return found


def main(arguments: list[str]) -> int:
    """Prints what is wrong, or what to type next."""
    wrong = [*problems(ROOT, draft="--draft" in arguments), *build(ROOT, OUT)]
    version, _, notes = notes_of((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    (OUT / "notes.md").write_text(f"ckptd {version}\n\n{notes}\n", encoding="utf-8")
    for one in wrong:
        print(f"problem: {one}", file=sys.stderr)
    if not wrong:
        print(f"ready: git tag -a v{version} --cleanup=verbatim -F build/release/notes.md")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
