"""The documented way, as a user without root: it works, and nothing is written outside home, store and arena."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.cluster import CODE, ROOT
from tests.security.others import a_free_uid, needs_root

pytestmark = [needs_root, pytest.mark.faults, pytest.mark.timeout(300)]

PYTHON = [sys.executable, "-W", "ignore"]
CKPTD = [*PYTHON, "-m", "ckptd"]


_ASKING = """
    import subprocess, sys
    for verb in (["status"], ["drain", "--wait"]):
        subprocess.run([sys.executable, "-m", "ckptd", *verb], check=True)
"""


def first_save():
    """The README's program, with shorter steps of a smaller model, and two questions to the daemon at its end."""
    blocks = re.findall(r"^```python\n(.*?)^```", pathlib.Path(ROOT, "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (program,) = [block for block in blocks if 'connect(job="first"' in block]
    assert "time.sleep(0.2)" in program
    return program.replace("time.sleep(0.2)", "time.sleep(0.005)").replace("2048", "256") + _ASKING


def live(*commands, home_mode=0o700, umask=0o022, **files):
    """What the cell says. Skips where it cannot be made."""
    uid = a_free_uid()
    spec = {"uid": uid, "home_mode": home_mode, "umask": umask, "commands": commands, "files": files}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tests.security.cell", json.dumps(spec)],
        env=os.environ | {"PYTHONPATH": CODE}, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    if "Error: [Errno 1]" in done.stderr:
        pytest.skip(f"a mount namespace cannot be had here: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return uid, json.loads(done.stdout)


def test_the_documented_way_writes_to_store_and_arena_alone():
    """Not even to the home. In the arena nothing is open to others, whatever the umask, which is 0 here: not the
    log, nor what ranks make. In the store the umask decides.
    """
    train = [*PYTHON, "first.py"]
    commands = [train, train, [*CKPTD, "list", "/tmp/ckpt"], [*CKPTD, "verify", "/tmp/ckpt"]]
    uid, told = live(*commands, home_mode=0o500, umask=0, **{"first.py": first_save()})
    assert [status for status, _ in told["done"]] == [0, 0, 0, 0], told["done"]
    first, second, listed, _ = (words for _, words in told["done"])
    arena, store = f"/dev/shm/ckptd-{uid}", "/tmp/ckpt"
    assert "starting at step 0 None" in first
    assert arena in first, "the status names it"
    assert "starting at step 100" in second
    assert "199" in listed
    wrote, there = told["wrote"], told["there"]
    torch = f"/tmp/torchinductor_uid_{uid}"  # its optimizers make it, with ckptd and without
    assert {path for path in wrote if not path.startswith((arena, store))} - {torch} == {"/tmp/home"}, (
        "was there before"
    )
    assert {f"{arena}/{name}" for name in ("ckptd.sock", "ckptd.log", "jobs")} <= set(wrote), "looked at while it ran"
    assert [path for path, mode in wrote.items() if path.startswith(arena) and mode[4:] != "------"] == []
    assert {mode for path, mode in wrote.items() if path.startswith(store) and mode[0] == "-"} == {"-rw-rw-rw-"}
    assert told["left"] == [], "the daemon has left by itself"
    assert [path for path in there if path.startswith(arena)] == []
    assert f"{store}/first/latest" in there
