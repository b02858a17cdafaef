"""Runs of a job, from the entries of its journal."""

import msgspec
import pytest

from ckptd.history.runs import runs_of
from ckptd.history.spread import percentile, spread
from ckptd.history.summary import row
from ckptd.shared.protocol.journal import Durable, Ended, Missing, Protected, Restored, RunBegan, RunEnded, Staged
from ckptd.shared.protocol.messages import End, Tier
from tests.unit.history.played import BEGAN, Training, played


def began(at=0.0, incarnation=1, **more):
    return RunBegan(
        at=at, incarnation=incarnation, run=bytes([incarnation]) * 16, world_size=16, nodes=2, coordinator="a", **more
    )


def flat(journal):
    return [entry for entries in journal for entry in entries]


def of(journal):
    return runs_of(flat(journal))


def staged(at, counter, step, **more):
    return Staged(at=at, counter=counter, step=step, nbytes=100, seconds=0.5, **more)


def test_a_row_has_the_figures_of_its_run():
    (run,) = of(
        [
            [
                began(10.0, scheme="xor", set_size=2, drain_every="2"),
                staged(20.0, 1, 100, stall_s=0.25, mean_stall_s=0.125),
                Protected(at=21.0, counter=1, seconds=1.0),
                staged(30.0, 2, 200, stall_s=0.75),
                Durable(at=31.0, counter=1, seconds=11.0, drain_s=4.0, nbytes=100, tries=2),
                Ended(at=32.0, counter=2, step=200, end=End.KEPT),
                Ended(at=40.0, counter=3, step=300, end=End.SKIPPED, reason="no slot"),
                Missing(at=41.0, records=7),
                RunEnded(at=50.0, how="closed"),
            ]
        ]
    )
    found = row(run, saves=True)
    assert (found.began, found.ended, found.how, found.over) == (10.0, 50.0, "closed", True)
    assert found.saves_by_end == {"durable": 1, "kept": 1, "skipped": 1}
    assert (found.newest_step, found.newest_staged_step) == (200, 200)
    assert (found.newest_protected_step, found.newest_durable_step) == (100, 100)
    assert msgspec.to_builtins(found.stall) == {"count": 2, "median": 0.25, "p99": 0.75, "total": 1.0}
    assert (found.to_protected.median, found.to_durable.median, found.drain.median) == (1.0, 11.0, 4.0)
    assert (found.staged_nbytes, found.drained_nbytes, found.store_bytes_per_s) == (200, 100, 25.0)
    assert [(one.step, one.end, one.reason) for one in found.saves] == [
        (100, "durable", ""), (200, "kept", ""), (300, "skipped", "no slot"),
    ]  # fmt: skip
    assert (found.missing, found.saves[0].tries) == (7, 2)
    assert not run.failed


def test_a_run_without_an_end_is_over_once_another_begins():
    first, second = of([[began(), staged(5.0, 1, 3)], [began(20.0, 2)]])
    assert (first.over, first.ended, first.end, first.failed) == (True, None, 5.0, True)
    assert (second.over, second.failed) == (False, False)


@pytest.mark.parametrize(("how", "failed"), [("closed", False), ("taken over", False), ("lost", True)])
def test_a_run_that_ended_by_itself_has_not_failed(how, failed):
    (run,) = of([[began(), staged(5.0, 1, 3), RunEnded(at=9.0, how=how)]])
    assert run.failed is failed


def test_connect_and_the_load_after_it_are_one_run():
    """Each takes a number."""
    load = Restored(at=4.0, incarnation=1, counter=1, step=7, seconds=2.0, tiers={Tier.ARENA: 16}, newest=9)
    runs = of([[began(1.0, 3)], [began(3.0, 4), load, staged(9.0, 1, 10)]])
    assert [(run.incarnation, run.incarnations, run.began) for run in runs] == [(4, [3, 4], 1.0)]
    assert runs[0].restores[0].lost_steps == 2


def test_a_load_in_the_midst_of_a_run_ends_it_and_is_no_failure():
    load = Restored(at=31.0, incarnation=1, counter=1, step=7, seconds=2.0, tiers={Tier.ARENA: 16})
    first, second = of([[began(1.0), staged(9.0, 1, 7), RunEnded(at=30.0, how="loaded")], [began(30.0, 2), load]])
    assert (first.over, first.failed, second.began) == (True, False, 30.0)


def test_ranks_that_were_away_and_came_back_are_in_the_same_run():
    """Not so where only the drain of its last save ends after the end of the run."""
    away, back = RunEnded(at=9.0, how="lost"), began(12.0, again=True)
    drained = Durable(at=13.0, counter=1, seconds=8.0, drain_s=2.0, nbytes=100)
    (run,) = of([[began(), staged(5.0, 1, 1), away, back, staged(15.0, 2, 2)]])
    assert (run.ended, run.over, len(run.saves)) == (None, False, 2)
    (run,) = of([[began(), staged(5.0, 1, 1), away, back, drained]])
    assert (run.ended, run.over, run.saves[0].end) == (9.0, True, "durable")


def test_a_save_that_the_next_run_drains_is_that_of_the_run_that_saved_it():
    drained = Durable(at=25.0, counter=1, seconds=0.0, drain_s=0.0, nbytes=100, incarnation=1)
    late = Ended(at=26.0, counter=1, step=3, end=End.SUPERSEDED, incarnation=1)
    unknown = Ended(at=27.0, counter=7, step=9, end=End.FAILED, incarnation=1)
    first, second = of([[began(), staged(5.0, 1, 3)], [began(20.0, 2), drained, late, unknown]])
    assert [(one.end, one.durable_s, one.drain_s) for one in first.saves] == [("durable", 20.0, None)]
    assert second.saves == []


def test_a_run_that_was_lost_before_its_first_save_stays_one():
    runs = of([[began(1.0, 3), RunEnded(at=2.0, how="lost")], [began(3.0, 4)]])
    assert [run.incarnation for run in runs] == [3, 4]


def test_lost_steps_of_a_restore_are_found_in_the_runs_before():
    load = Restored(at=22.0, incarnation=1, counter=1, step=100, seconds=2.0, tiers={Tier.PFS: 16})
    runs = of([[began(), staged(5.0, 1, 100), staged(9.0, 2, 150)], [began(20.0, 2), load]])
    assert runs[1].restores[0].lost_steps == 50


def test_a_segment_that_begins_again_and_a_second_daemon_change_no_run():
    moved = msgspec.structs.replace(began(7.0, again=True), coordinator="b")
    (run,) = of([[began(), staged(5.0, 1, 1), moved, staged(9.0, 2, 2)]])
    assert (run.began, run.coordinator, [save.step for save in run.saves]) == (0.0, "b", [1, 2])


def test_what_lacks_its_begin_is_left_out():
    """Damage may have taken any record."""
    (run,) = of([[staged(5.0, 1, 1)], [began(), Protected(at=6.0, counter=9, seconds=1.0)]])
    assert run.saves == []


def test_a_played_training_has_its_runs_saves_losses_and_restores():
    play = played(Training(), failures=3)
    runs = runs_of(play.entries)
    assert [run.failed for run in runs] == [True, True, True, False]
    assert [len(run.losses) for run in runs] == [1, 1, 1, 0]
    assert [len(run.restores) for run in runs] == [0, 1, 1, 1]
    assert sum(len(run.saves) for run in runs) == sum(isinstance(e, Staged) for one in play.journal for e in one)
    assert runs[0].began == BEGAN


def test_percentiles_are_values_that_were_seen():
    assert (percentile([3.0, 1.0, 2.0], 0.5), percentile([1.0], 0.99), percentile(range(1, 201), 0.99)) == (2, 1, 198)
    assert spread([None]) is None


def test_a_save_that_another_daemon_finds_again_keeps_its_times():
    """What a daemon did not see staged, it says, took 0 s: the record of the one that saw it has the time."""
    first = staged(10.0, 1, 100, stall_s=0.25)
    entries = [
        began(0.0), first, msgspec.structs.replace(first, at=60.0, seconds=0.0, stall_s=0.0),
        Protected(at=61.0, counter=1, seconds=0.0), Durable(at=70.0, counter=1, seconds=0.0, drain_s=4.0, nbytes=10),
    ]  # fmt: skip
    (save,) = runs_of(entries)[0].saves
    assert (save.at, save.staged_s, save.stall_s) == (10.0, 0.5, 0.25)
    assert (save.protected_s, save.durable_s, save.drain_s) == (51.0, 60.0, 4.0)
