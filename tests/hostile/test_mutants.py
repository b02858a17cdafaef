"""A few mutants of each kind of file through every reader of it; `make mutants` makes tens of thousands."""

import os
import sys

import pytest

from tests import pythons
from tests.cluster import CODE, ROOT
from tests.hostile.mutant_kinds import KINDS

pytestmark = pytest.mark.timeout(300)
COUNT = int(os.environ.get("MUTANTS", "2"))  # of a kind


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
count, seed, name, harms = int(sys.argv[1]), int(sys.argv[2]), *(sys.argv[3:4] or [""]), sys.argv[4:]
kind = mutants.KINDS.get(name)
readers = {
    "raises": lambda path: {}["x"],
    "takes memory": lambda path: len(b"1" * (1 << 26)),
    "takes time": lambda path: all(time.process_time() < e for e in itertools.repeat(time.process_time() + 0.6)),
    "talks": lambda path: (_ for _ in ()).throw(Talkative()),
    "dies": lambda path: __import__("os").abort(),  # the last: no reader follows
}
if harms:
    mutants.MAX_S = 0.4
    mutants.KINDS[name] = kind._replace(readers={harm: readers[harm] for harm in harms})
found = mutants.campaign(count, seed, name or None)
for one in found:
    print(f"{one.reader or 'dies'}: {one.kind}: {one.what}  make mutants ONE={seed}-{one.number}")
sys.exit(bool(found))
"""


def test_some_of_each_kind():
    done = run(COUNT * len(KINDS), 7)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]


HARMS = {
    "raises": "KeyError", "takes memory": "bytes for", "takes time": " s", "talks": "characters",
    "dies": "died, status",
}  # fmt: skip


def test_the_campaign_finds_each_harm():
    """A reader that does what none may do."""
    done = run(2, 0, "topology", *HARMS)
    assert done.returncode == 1, done.stdout + done.stderr[-3000:]
    told = [line.partition(": ") for line in done.stdout.splitlines()]
    assert sorted(harm for harm, _, _ in told) == sorted([*HARMS, *HARMS]), done.stdout
    assert all(HARMS[harm] in text for harm, _, text in told), done.stdout
