"""What a client that ends says of saves that are not safe: once, and nothing where all is well."""

import pytest

from ckptd.shared.base.ids import NO_RUN, SaveId
from ckptd.shared.protocol.messages import End, Milestone, Progress
from ckptd_client._local.save_record import HandleBook, SaveRecord
from ckptd_client._save.end_warning import unsafe

WAITS = "waits for rank 1: every rank must call save"


def _save(step):
    return SaveId(incarnation=1, counter=step, step=step, run=NO_RUN)


def _told(*news, saves=3, daemon_lost=False):
    book = HandleBook()
    for step in range(saves):
        book.add(SaveRecord(_save(step), lambda *_: None))
    book.hear(news)
    return unsafe(book.handles, book.outlook, "/dev/shm/a", daemon_lost=daemon_lost)


def _staged(step):
    return Progress(save=_save(step), milestone=Milestone.STAGED)


def _durable(step):
    return Progress(save=_save(step), milestone=Milestone.DURABLE, end=End.DURABLE)


STUCK = Progress(save=_save(0), milestone=Milestone.STAGED, notice="failed", stuck="drains to /s fail: full")


@pytest.mark.parametrize(
    "news",
    [
        [],  # the other ranks may be a moment later
        [_staged(0), _staged(1), _staged(2)],  # the drain runs
        [_durable(2)],
        [STUCK, _staged(2), _durable(2)],  # a later drain has ended well
        [Progress(save=_save(0), reason=WAITS), _staged(2)],  # a newer one is complete
        [Progress(save=_save(0), end=End.SKIPPED, reason="no slot"), _staged(2)],
    ],
)
def test_nothing_where_all_is_well(news):
    assert _told(*news) is None


def test_a_client_that_saved_nothing():
    assert _told(saves=0, daemon_lost=True) is None


def test_saves_that_other_ranks_do_not_deliver():
    text, hint = _told(_staged(0), Progress(save=_save(1), reason=WAITS, idle=True))
    assert text.startswith("2 saves (steps 1 to 2) are not complete and cannot be restored: step 1 waits for rank 1")
    assert text.endswith("; newest complete save of this run: step 0")
    assert hint == ""


def test_a_newest_save_that_failed():
    text, hint = _told(_staged(1), Progress(save=_save(2), end=End.ABANDONED, reason="rank 1 ended"))
    assert text.startswith("step 2 is not complete and cannot be restored: it failed: rank 1 ended")
    assert hint


def test_a_newest_save_that_does_not_become_durable():
    text, hint = _told(STUCK, _staged(2))
    assert text.startswith("step 2, the newest complete save, is only in memory")
    assert "newest durable step of this run: none; drains to /s fail: full" in text
    assert hint == "mend that, then: ckptd drain --wait --arena /dev/shm/a"


def test_a_failure_after_the_newest_durable_one():
    stuck = Progress(save=_save(1), milestone=Milestone.STAGED, stuck="drains to /s fail: full")
    text, _ = _told(_durable(0), _staged(1), stuck)
    assert "newest durable step of this run: step 0" in text


def test_a_daemon_that_ended():
    text, hint = _told(_staged(2), daemon_lost=True)
    assert text.endswith("no daemon runs on this node")
    assert hint == "ckptd run --arena /dev/shm/a"
    assert _told(_durable(2), daemon_lost=True) is None


def test_a_rank_that_did_not_save_what_others_saved():
    missed = Progress(save=_save(7), end=End.ABANDONED, reason="rank 0 saved it, and rank 1 has not\n  hint: call it")
    text, hint = _told(missed, saves=0)
    assert text == "step 7 is not complete and cannot be restored: rank 0 saved it, and rank 1 has not"
    assert hint == "call it"
    assert _told(missed, Progress(save=_save(8), milestone=Milestone.STAGED), saves=0) is None
