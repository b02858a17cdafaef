"""Times of milestones come from the play: each piece of hardware that is slower makes later what waits for it."""

import dataclasses
import os

import pytest

from ckptd.shared.format.schemes import Scheme
from tests.simulation.costs import Costs
from tests.simulation.hardware import Measured
from tests.simulation.milestones import play

GIB = 1 << 30
SETS = [f"{scheme}/{members}" for scheme in (Scheme.XOR, Scheme.DOUBLE) for members in (4, 8)]
HARDWARE = Measured(
    nbytes=GIB, ranks=8, copy_bytes_per_s=8 * GIB, read_bytes_per_s=4 * GIB, digest_bytes_per_s=16 * GIB,
    encode_byte_s={key: (0.25 if key.startswith("xor") else 0.5) / GIB for key in SETS},
    pulled={key: 1.0 if key.startswith("xor") else 2.0 for key in SETS},
    line_bytes_per_s=10 * GIB, store_bytes_per_s=2 * GIB, commit_s=0.5, slower=0.0,
)  # fmt: skip
LONG = os.environ.get("FAULTS") == "long"
COSTS = Costs(core=True)
PIECES = {  # which piece: how long 8 times slower takes more, of what
    "copy_bytes_per_s": ("staged_s", 7 * 1 / 8),
    "digest_bytes_per_s": ("protected_s", 7 * 8 / 16),
    "line_bytes_per_s": ("protected_s", 8 * 8 / 10 - 8 * 0.25),
    "store_bytes_per_s": ("durable_s", 7 * 8 / 2),
    "read_bytes_per_s": ("restored_s", 7 * 1 / 4),
}


def times(nodes=4, scheme=Scheme.XOR, **changed):
    return play(nodes, scheme, COSTS, dataclasses.replace(HARDWARE, **changed))


@pytest.fixture(scope="module")
def usual():
    return times()


def test_a_job_takes_as_long_as_its_bytes(usual):
    small = pytest.approx
    assert usual.staged_s == small(1 / 8, abs=0.1)
    assert usual.protected_s - usual.staged_s == small(8 / 16 + 8 * 0.25, abs=0.3)
    assert usual.durable_s - usual.staged_s == small(8 / 2 + 0.5, abs=0.3)
    assert usual.restored_s - usual.connected_s == small(1 / 4, abs=0.1)
    assert 0 < usual.save_busy_s < usual.durable_s
    assert usual.links_lost == 0


@pytest.mark.parametrize("piece", PIECES if LONG else ["line_bytes_per_s", "read_bytes_per_s"])
def test_a_slower_piece_makes_later_what_waits_for_it(usual, piece):
    what, later_s = PIECES[piece]
    slow = times(**{piece: getattr(HARDWARE, piece) / 8})
    assert getattr(slow, what) - getattr(usual, what) == pytest.approx(later_s, rel=0.2, abs=0.1)


@pytest.mark.parametrize("scheme", Scheme if LONG else [Scheme.DOUBLE])
def test_a_larger_job_reaches_each_milestone(scheme):
    found = times(16, scheme)
    assert (found.protected_s is None) == (scheme is Scheme.NONE)
    assert 0 < found.staged_s < found.durable_s < 10
    assert 0 < found.connected_s < found.restored_s < 2


def test_what_the_core_takes_is_time_of_the_loop(usual):
    with_core, without = usual, play(4, Scheme.XOR, Costs(), HARDWARE)
    assert with_core.core_s > 0.5 * without.core_s > 0
    assert with_core.save_busy_s + with_core.restore_busy_s > without.save_busy_s + without.restore_busy_s
