"""A shared memory that is too small for the state: told with numbers before training starts, never by SIGBUS."""

import contextlib
import os
import subprocess
from pathlib import Path

import pytest

from tests.faults.mounts import mounted, needs_root
from tests.faults.ranks import MB, Rank, RankError, Ranks, told

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240), needs_root]

LONG = os.environ.get("FAULTS") == "long"
SHM_NBYTES = 64 * MB
OVER = ("failed", "skipped")  # on this side, then for all ranks
HOW = ("at once", "others take what is free", "by prepare", "the daemon restarts")
FITS, TOO_LARGE = 8 * MB, 40 * MB  # three slots of each; one of the latter would fit


@pytest.fixture(name="node")
def fixture_node(tmp_path: Path):
    store, shm = tmp_path / "store", tmp_path / "shm"
    store.mkdir()
    shm.mkdir()
    with mounted(str(shm), "-t", "tmpfs", "-o", f"size={SHM_NBYTES},mode=0755", "tmpfs"):
        arena = shm / "arena"
        arena.mkdir(mode=0o700)
        with told(str(store), arena=str(arena)) as node:
            node.start()
            yield node


def hog(node) -> None:
    """Others take all memory that is free now."""
    path = os.path.join(os.path.dirname(node.arena), "hog")
    dd = ["dd", "if=/dev/zero", f"of={path}", "bs=1M", "oflag=append", "conv=notrunc"]
    subprocess.run(dd, check=False, capture_output=True)
    assert os.statvfs(path).f_bavail == 0


def error_of(rank: Rank) -> RankError | None:
    """What the call ended with."""
    try:
        rank.result()
    except RankError as error:
        return error
    return None


def assert_says_all(text: str) -> None:
    """The numbers, and what to do."""
    assert "rank 0 needs 3 slots of 40" in text
    assert "room for" in text
    assert "mount -o remount,size=" in text


def test_prepare_refuses_with_the_numbers_and_the_setting(node):
    with Ranks(node, nbytes=TOO_LARGE) as ranks:
        ranks.call("connect")
        with pytest.raises(RankError) as error:
            ranks.call("prepare")
        assert error.value.kind == "BudgetError"
        assert error.value.seconds < 5
        assert_says_all(str(error.value))
        assert node.slots() == []
        ranks.call("resize", FITS)
        ranks.call("prepare")
        ranks.call("save", 1)
        assert ranks.call("wait", 1) == [("durable", "durable")]


def test_a_save_that_does_not_fit_fails_its_handle_and_training_goes_on(node):
    with Ranks(node, nbytes=TOO_LARGE) as ranks:
        ranks.call("connect")
        for step in (1, 2):
            assert ranks.call("save", step)[0] < 5
            ((_, end, reason),) = ranks.call("handle", step)
            assert end in OVER
            assert_says_all(reason)
        with pytest.raises(RankError, match="room for"):
            ranks.call("wait", 2, "staged")
        ranks.call("resize", FITS)
        ranks.call("save", 3)
        assert ranks.call("wait", 3) == [("durable", "durable")]


def test_a_state_that_outgrows_the_memory_leaves_the_last_checkpoint_alone(node):
    with Ranks(node, nbytes=FITS) as ranks:
        ranks.call("connect")
        ranks.call("save", 1)
        ranks.call("wait", 1)
        ranks.call("resize", TOO_LARGE)
        ranks.call("save", 2)
        assert ranks.call("handle", 2)[0][1] in OVER
        ranks.kill()
    with Ranks(node, nbytes=FITS) as ranks:
        ranks.call("connect")
        (found,) = ranks.call("load")
        assert (found["step"], found["intact"]) == (1, True)


@pytest.mark.parametrize(
    ("world", "how"), [(1, how) for how in HOW] + [(2, how) for how in HOW if LONG or how == HOW[0]]
)
def test_sizes_that_fitted_before_a_state_that_was_too_large_fit_again(node, how, world):
    fits = FITS // world
    with Ranks(node, world, nbytes=fits) as ranks:
        ranks.call("connect")
        for step in (1, 2, 3, 4):  # by then all slots are there
            ranks.call("save", step)
            ranks.call("wait", step)
        if how == "others take what is free":
            hog(node)
        for step in range(5, 11, 2):
            ranks.call("resize", TOO_LARGE)
            if how == "by prepare":
                with pytest.raises(RankError, match="room for"):
                    ranks.call("prepare")
                for rank in ranks.all[1:]:
                    with contextlib.suppress(RankError):
                        rank.result()
            else:
                ranks.call("save", step)
                assert all(end in (*OVER, "abandoned") for _, end, _ in ranks.call("settle", step))
            if how == "others take what is free":
                hog(node)
            if how == "the daemon restarts":
                node.kill()
                node.start()
            ranks.call("resize", fits)
            ranks.call("save", step + 1)
            assert ranks.call("wait", step + 1) == [("durable", "durable")] * world, ranks.call("handle", step + 1)


def test_two_ranks_that_fit_only_one_by_one_are_reported_and_none_dies(node):
    with Ranks(node, 2, nbytes=12 * MB) as ranks:
        ranks.call("connect")
        ranks.start("prepare")
        errors = [error for rank in ranks.all if (error := error_of(rank)) is not None]
        assert [error.kind for error in errors] == ["BudgetError"]
        assert "room for" in str(errors[0])
        stalls = ranks.call("save", 1)
        assert max(stalls) < 11
        assert all(end in (*OVER, "abandoned") for _, end, _ in ranks.call("settle", 1))
        assert all(rank.process.is_alive() for rank in ranks.all)


def test_memory_that_others_take_after_the_slots_were_made_harms_no_save(node):
    with Ranks(node, nbytes=FITS) as ranks:
        ranks.call("connect")
        ranks.call("prepare")
        hog(node)
        for step in range(1, 6):
            ranks.call("save", step)
            assert ranks.call("wait", step) == [("durable", "durable")]
