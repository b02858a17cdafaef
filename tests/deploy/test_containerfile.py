"""deploy/Containerfile: what it copies is there, and its commands do what they should, in a directory for a root."""

import json
import os
import pathlib
import re
import shlex
import shutil
import site
import subprocess
import sys

import pytest

import ckptd
from tests.cluster import ROOT
from tests.long_form import LONG

FILE = pathlib.Path(ROOT) / "deploy/Containerfile"
KNOWN = {"FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "ENTRYPOINT", "CMD", "HEALTHCHECK"}


def instructions():
    """(name, rest) of each, comments left out and continued lines joined."""
    text = re.sub(r"^#.*\n", "", FILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def of(name):
    return [rest for found, rest in instructions() if found == name]


class Image:
    """Runs the instructions of all stages in one directory: what one stage copies from another is there already."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        self.where = pathlib.Path("/")

    def path(self, inside):
        return self.root / str(self.where / inside).lstrip("/")

    def do(self, name, rest):
        match name:
            case "FROM":
                self.where = pathlib.Path("/")
            case "WORKDIR":
                self.where = self.where / rest
                self.path(".").mkdir(parents=True, exist_ok=True)
            case "COPY" if not rest.startswith("--from"):
                *sources, target = rest.split()
                for source in map(pathlib.Path(ROOT).joinpath, sources):
                    self.copy(source, self.path(target))
            case "COPY":
                assert self.path(rest.split()[1]).exists(), "made by an earlier stage"
            case "RUN":
                self.run(rest)

    def copy(self, source, target):
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target / source.name)

    def run(self, command):
        """With the packages that the tests have, instead of an index: none of them is built or fetched again."""
        words = [self.inside(word) for word in shlex.split(command)]
        words[0] = sys.executable if words[0] == "python" else words[0]
        offline = {
            "PIP_NO_INDEX": "1",
            "PIP_NO_DEPS": "1",
            "PIP_NO_COMPILE": "1",
            "PIP_NO_BUILD_ISOLATION": "0",
        }  # 0: pip's negation of a "no"
        environ = os.environ | offline | {"PYTHONPATH": os.pathsep.join(site.getsitepackages())}
        done = subprocess.run(
            words, cwd=self.path("."), env=environ, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def inside(self, word):
        return str(self.path(word)) if word.startswith("/") else word


def test_its_form():
    names = [name for name, _ in instructions()]
    assert set(names) <= KNOWN
    assert names[0] == "FROM"
    stages = of("FROM")
    assert stages[0].split()[1:] == ["AS", "build"]
    assert stages[0].split()[0] == stages[-1].split()[0], "what was compiled for one python runs in the same"
    minor = re.fullmatch(r"docker\.io/library/python:3\.(\d+)-slim", stages[-1].split()[0])
    assert int(minor[1]) >= 11
    assert names.index("USER") > len(names) - 1 - names[::-1].index("COPY"), "nothing is copied as the user"
    assert of("USER")[-1].split(":")[0].isdigit()
    assert of("USER")[-1].split(":")[0] != "0"


def test_what_is_copied_is_there_and_in_the_repository():
    sources = [word for rest in of("COPY") if not rest.startswith("--") for word in rest.split()[:-1]]
    listed = subprocess.run(["git", "ls-files", *sources], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not in a git checkout")
    found = {line.split("/")[0] for line in listed.stdout.splitlines()}
    assert found == set(sources)


@pytest.mark.skipif(not LONG, reason="it builds and installs the packages: FAULTS=long")
@pytest.mark.timeout(300)
def test_its_commands_in_order_give_a_ckptd_that_runs(tmp_path):
    image = Image(tmp_path)
    for name, rest in instructions():
        image.do(name, rest)
    path = of("ENV")[0].removeprefix("PATH=").split(":")[0]
    installed = image.inside(path)
    (entry,) = json.loads(of("ENTRYPOINT")[0])
    environ = {"PYTHONPATH": os.pathsep.join(site.getsitepackages()), "PATH": installed}
    words = [os.path.join(installed, entry), "--version"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=120, check=False, cwd="/")
    assert done.stdout == f"ckptd {ckptd.__version__}\n", done.stderr
    packages = next(pathlib.Path(installed).parent.glob("lib/python3*/site-packages"))
    assert (packages / "ckptd_client/__init__.py").exists()
    for verb in (json.loads(of("CMD")[0])[0], json.loads(of("HEALTHCHECK")[0].partition("CMD ")[2])[1]):
        assert subprocess.run([*words[:1], verb, "--help"], env=environ, timeout=120, check=False).returncode == 0
