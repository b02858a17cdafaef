"""Every malformed checkpoint to every reader of ours: an error that names the file, nothing run, nothing hung."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests import pythons
from tests.checkpoints import write_checkpoint
from tests.cluster import ROOT
from tests.hostile.cases import CASES, EXPORT, LIST, LOAD, MARKER, REBUILD, VERIFY
from tests.hostile.part_cases import PART_CASES
from tests.hostile.reader import some_state

pytestmark = pytest.mark.timeout(300)
MAX_GROWN_NBYTES = 48 << 20  # a buffer of 16 MiB and what Python keeps; the largest of the files has 1.1 MB
READERS = {
    "load": LOAD, "load_two": LOAD, "load_from": LOAD, "plugin": LOAD, "verify": VERIFY, "list": LIST,
    "export": EXPORT, "export_dcp": EXPORT, "rebuild": REBUILD,
}  # fmt: skip
LONG = os.environ.get("FAULTS") == "long"
ALIKE = {"load_two", "load_from", "export_dcp"}  # load and export up to where they read values: some are enough
SOME = 4  # each so many'th case is enough
SETS = {"one file": CASES, "boxes": PART_CASES}


def copy_of(sound: Path, folder: Path) -> Path:
    """A job of its own with the same checkpoint."""
    final = folder / "store" / "demo" / sound.name
    shutil.copytree(sound.parent, final.parent, symlinks=True)
    return final


@pytest.fixture(scope="module", params=SETS)
def chosen(request):
    return request.param


@pytest.fixture(scope="module")
def sound(chosen, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("sound"), [some_state(boxes=chosen == "boxes")])


@pytest.fixture(scope="module")
def forged(chosen, sound, tmp_path_factory):
    """Case name to directory."""
    folder = tmp_path_factory.mktemp("forged")
    made = {}
    for number, (name, case) in enumerate(SETS[chosen].items()):
        made[name] = copy_of(sound, folder / str(number))
        case.make(made[name])
    return made


@pytest.fixture(scope="module")
def marker(tmp_path_factory):
    return tmp_path_factory.mktemp("marker") / "made"


def answers(reader, chosen, directories, marker):
    """What each directory, after a sound one, came to. One process for all: it must live to the end."""
    done = pythons.run(
        [sys.executable, "-m", "tests.hostile.reader", reader, *(["boxes"] if chosen == "boxes" else [])],
        input="\n".join(map(str, directories)),
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/client", MARKER: str(marker), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(directories), f"it died at {directories[len(found)]}:\n{done.stderr[-3000:]}"
    return found


def word_of(reader, case):
    """DCP has names, not places, for values."""
    return case.file.removeprefix("state[").removesuffix("]") if reader == "plugin" else case.file


def cases_for(reader, chosen):
    """All; in the short form those that the reader must refuse, and some of the others."""
    found = list(SETS[chosen].items())
    if LONG or reader == "load":
        return found
    some = {name for name, _ in found[::SOME]}
    return [(name, one) for name, one in found if name in some or (reader not in ALIKE and READERS[reader] in one.by)]


@pytest.mark.parametrize("reader", READERS)
def test_every_case_is_refused_by_name(reader, chosen, sound, forged, marker):
    cases = cases_for(reader, chosen)
    first, *others = answers(reader, chosen, [sound, *(forged[name] for name, _ in cases)], marker)
    assert first["kind"] == "", first
    wrong = []
    for (name, case), found in zip(cases, others, strict=True):
        told = f"{name}: {found['kind']} {found['text'][:300]}"
        if found["kind"] not in ("", "CkptdError") or found["seconds"] > 10:
            wrong.append(f"not an error of ours: {told} after {found['seconds']:.1f} s")
        elif READERS[reader] in case.by and (not found["kind"] or word_of(reader, case) not in found["text"]):
            wrong.append(f"not refused by the name {word_of(reader, case)}: {told}")
        elif found["grown"] > MAX_GROWN_NBYTES:
            wrong.append(f"took {found['grown']:,} bytes: {told}")
    assert not marker.exists(), "something of the checkpoint was run"
    assert not wrong, f"{len(wrong)} of {len(others)}:\n" + "\n".join(wrong)
