"""A few mutants of each kind of file through every reader of it; `make mutants` makes tens of thousands."""

import os
import sys

import pytest

from tests import pythons
from tests.cluster import CODE, ROOT
from tests.hostile.mutant_kinds import KINDS

pytestmark = pytest.mark.timeout(300)
COUNT = int(os.environ.get("MUTANTS", "8"))  # of a kind


def run(*words, timeout_s=280):
    """In a process of its own: the campaign forks."""
    return pythons.run(
        [sys.executable, "-W", "ignore", "-c", _CODE, *map(str, words)],
        env=os.environ | {"PYTHONPATH": CODE, "OMP_NUM_THREADS": "1"},
        cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip


_CODE = """
import itertools, sys, time
from tests.hostile import mutants
class Talkative(mutants.CkptdError):
    __init__ = lambda self: Exception.__init__(self, "x" * 30_000)  # past what the base would cut off
count, seed, mark = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
if mark:
    name = mark[0]
    kind = mutants.KINDS[name]
    harm = {
        "raises": lambda path: {}["x"],
        "takes memory": lambda path: len(bytearray(1 << 26).replace(b"\\0", b"1")),
        "takes time": lambda path: all(time.process_time() < e for e in itertools.repeat(time.process_time() + 0.6)),
        "dies": lambda path: __import__("os").abort(),
        "talks": lambda path: (_ for _ in ()).throw(Talkative()),
    }[mark[1]]
    mutants.MAX_S = min(mutants.MAX_S, 0.4 if mark[1] == "takes time" else mutants.MAX_S)
    mutants.KINDS[name] = kind._replace(readers={"harm": harm})
    found = mutants.campaign(count, seed, name)
else:
    found = mutants.campaign(count, seed)
print("\\n".join(f"{one.kind}, {one.reader}: {one.what}  make mutants ONE={seed}-{one.number}" for one in found))
sys.exit(bool(found))
"""


def test_some_of_each_kind():
    done = run(COUNT * len(KINDS), 7)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]


@pytest.mark.parametrize(
    ("harm", "word"),
    [
        ("raises", "KeyError"), ("takes memory", "bytes for"), ("takes time", " s"), ("dies", "died, status"),
        ("talks", "characters"),
    ],
)  # fmt: skip
def test_the_campaign_finds(harm, word):
    """A reader that does what none may do."""
    done = run(2, 0, "topology", harm)
    assert done.returncode == 1, done.stdout + done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == 2, done.stdout
    assert all(word in line for line in done.stdout.splitlines()), done.stdout
