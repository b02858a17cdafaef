"""What make release-check compares is equal in this checkout, and it finds what is not."""

import shutil
from pathlib import Path

import pytest

from scripts import release_check as release
from tests.cluster import ROOT

FILES = ("ckptd/__init__.py", "CHANGELOG.md", "pyproject.toml", "deploy")


@pytest.fixture
def checkout(tmp_path):
    for name in FILES:
        source, target = Path(ROOT, name), tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    return tmp_path


def test_this_checkout_is_ready_but_for_the_date():
    assert release.problems(Path(ROOT), draft=True) == []
    places = [place for place, _ in release.versions(Path(ROOT))]
    assert {"CHANGELOG.md", "deploy/conda/recipe.yaml", "deploy/Containerfile"} <= set(places)


@pytest.mark.parametrize(
    ("name", "old", "new", "problem"),
    [
        ("ckptd/__init__.py", '"0.1.0"', '"0.2.0"', "CHANGELOG.md: 0.1.0, not 0.2.0"),
        ("deploy/conda/recipe.yaml", 'version: "0.1.0"', 'version: "0.1"', "deploy/conda/recipe.yaml: 0.1, not 0.1.0"),
        ("deploy/Containerfile", "ckptd:0.1.0", "ckptd:0.0.9", "deploy/Containerfile: 0.0.9, not 0.1.0"),
        ("deploy/conda/recipe.yaml", "click >=8.1", "click >=7", "click >=7, pyproject.toml has >=8.1"),
        ("pyproject.toml", '  "rich>=13.7",', '  "rich>=13.7",\n  "attrs>=25",', "attrs None, pyproject.toml has >=25"),
        ("CHANGELOG.md", "## 0.1.0 (", "## 0.1.0 (unreleased)\n\n## 0.0.9 (", "nothing stands under the version"),
    ],
)
def test_what_is_not_equal_is_named(checkout, name, old, new, problem):
    path = checkout / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    assert any(problem in one for one in release.problems(checkout, draft=True)), release.problems(checkout, draft=True)


def test_a_release_has_a_date(checkout):
    path = checkout / "CHANGELOG.md"
    version, date, _ = release.notes_of(path.read_text())
    for told, found in (("unreleased", ["give the date"]), ("2026-01-31", [])):
        path.write_text(path.read_text().replace(f"## {version} ({date})", f"## {version} ({told})"))
        date = told
        assert [part for part in found if part in "".join(release.problems(checkout))] == found
        assert bool(release.problems(checkout)) == bool(found)


def test_notes_are_the_newest_section():
    text = "# Changelog\n\n## 0.2.0 (2026-01-31)\n\n- **a**\n\n## 0.1.0 (2025-01-31)\n\n- b\n"
    assert release.notes_of(text) == ("0.2.0", "2026-01-31", "- **a**")
    with pytest.raises(ValueError, match="no heading"):
        release.notes_of("# Changelog\n\n## soon\n")


def test_rattler_build_renders_the_recipe():
    rattler_build = pytest.importorskip("rattler_build")
    recipe = rattler_build.Stage0Recipe.from_file(Path(ROOT, "deploy/conda/recipe.yaml"))
    (variant,) = recipe.render()
    assert (variant.recipe.package.name, str(variant.recipe.package.version)) == (
        "ckptd",
        release.version_of(Path(ROOT)),
    )
