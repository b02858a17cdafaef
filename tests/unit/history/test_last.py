"""The last state of a job, from the runs that its journal tells of and from what its store has."""

import pytest

from ckptd.history.last import last_of
from ckptd.history.runs import runs_of
from ckptd.shared.protocol.journal import Lost, Protected, Restored, RunBegan, RunEnded, Staged, Steps
from ckptd.shared.protocol.messages import Tier


def began(number, at):
    return RunBegan(
        at=at, incarnation=number, run=bytes([number]) * 16, world_size=2, nodes=1, coordinator=f"node{number}"
    )


def staged(counter, step, at):
    return Staged(at=at, counter=counter, step=step, nbytes=10, seconds=0.1)


def restored(incarnation, counter, step, at):
    return Restored(at=at, incarnation=incarnation, counter=counter, step=step, seconds=1.0, tiers={Tier.ARENA: 2})


def of(*entries, committed=()):
    return last_of(runs_of(entries), committed)


def steps(found):
    return [(one.incarnation, one.step) for one in found.unsaved]


FIRST = [began(1, 0.0), staged(1, 50, 10.0), staged(2, 100, 20.0), Protected(at=21.0, counter=2, seconds=1.0)]


def test_what_is_newer_than_the_newest_committed_one_is_not_saved():
    last = of(*FIRST, committed=[(1, 1, 50)])
    assert steps(last) == [(1, 100)]
    assert last.unsaved[0].protected
    assert (last.durable.step, last.durable.at, last.durable.protected) == (50, 10.0, False)
    assert last.newest_step == 100


def test_all_is_saved_whatever_order_the_store_lists_it_in():
    last = of(*FIRST, committed=[(1, 2, 100), (1, 1, 50)])
    assert (steps(last), last.durable.step) == ([], 100)


def test_nothing_is_committed():
    last = of(*FIRST)
    assert (steps(last), last.durable) == ([(1, 100), (1, 50)], None)


def test_a_checkpoint_that_the_journal_does_not_know_is_durable_all_the_same():
    last = of(*FIRST, committed=[(1, 3, 150)])
    assert (steps(last), last.durable.step, last.durable.at) == ([], 150, None)


def test_a_load_gives_up_what_is_newer_of_the_runs_before_it():
    back = [*FIRST, began(2, 30.0), restored(1, 1, 50, 31.0)]
    assert steps(of(*back, committed=[(1, 1, 50)])) == []
    assert steps(of(*back, staged(1, 60, 40.0), committed=[(1, 1, 50)])) == [(2, 60)]


def test_a_load_of_the_newest_gives_up_nothing():
    back = [*FIRST, began(2, 30.0), restored(1, 2, 100, 31.0)]
    assert steps(of(*back, committed=[(1, 1, 50)])) == [(1, 100)]


@pytest.mark.parametrize("how", ["closed", "lost"])
def test_the_last_run_says_how_it_ended_and_what_it_lost(how):
    loss = Lost(at=25.0, node="node1", what="ranks", ranks=2)
    last = of(*FIRST, loss, Steps(at=26.0, step=120), RunEnded(at=27.0, how=how)).run
    assert (last.incarnation, last.how, last.ended, last.over, last.coordinator) == (1, how, 27.0, True, "node1")
    assert (last.loss.what, last.problem) == ("ranks", None)
    assert of(*FIRST, Steps(at=26.0, step=120)).newest_step == 120


def test_without_a_journal_the_store_alone_counts():
    last = of(committed=[(3, 1, 7)])
    assert (last.run, last.durable.step, last.unsaved, last.newest_step) == (None, 7, [], None)
