"""How long saves, drains and loads take, as the coordinator counts them."""

from ckptd.core import events as ev
from ckptd.core.coordinator.distribution import SECONDS, Distribution
from ckptd.core.coordinator.timings import DRAIN_RATE, RESTORE
from ckptd.shared.base.ids import SaveId
from ckptd.shared.protocol.messages import Tier
from tests.runs import RUN
from tests.unit.core.a_job import KEY, AJob
from tests.unit.core.nodes import a_cluster


def save(number):
    return SaveId(1, number, 10 * number, RUN)


def timings(job):
    return job.catalogue.jobs[KEY].coordinator.timings


def counted(histograms):
    """By what and tier: how many values, and their sum."""
    return {(one.what, one.tier): (sum(one.counts), round(one.total, 3)) for one in histograms if any(one.counts)}


def test_a_value_counts_up_to_its_bound_and_a_large_one_above_all():
    found = Distribution((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.5):
        found.add(value)
    shown = found.shown("x")
    assert (shown.bounds, shown.counts, shown.total) == ([1.0, 2.0], [2, 1, 1], 5.5)


def test_a_distribution_continues_that_of_an_earlier_daemon_and_no_other():
    first, second = Distribution((1.0, 2.0)), Distribution((1.0, 2.0))
    first.add(0.5)
    second.add(1.5)
    second.resume(first.shown("x"))
    assert (second.shown("x").counts, second.shown("x").total) == ([1, 1, 0], 2.0)
    other = Distribution((1.0, 3.0))
    other.resume(first.shown("x"))
    assert sum(other.shown("x").counts) == 0, "with other bounds nothing is guessed"


def test_each_milestone_is_counted_once_from_the_first_rank_on():
    job = AJob(slots_per_rank=8).start()
    job.stage(0, save(1))
    job.tick(2.0)
    job.stage(1, save(1))
    job.tick(10.0)
    job.drain(save(1))
    job.tick(5.0)
    assert counted(timings(job).histograms()) == {
        ("staged", ""): (1, 2.0),
        ("durable", ""): (1, 12.0),
        (DRAIN_RATE, ""): (1, 2.0),
    }
    assert timings(job).last_drain.seconds == 10.0


def test_a_save_that_never_became_whole_is_not_counted():
    job = AJob().start()
    job.stage(0, save(1))
    job.tick(2.0)
    job.gone(1)
    assert counted(timings(job).histograms()) == {}


def test_what_was_found_at_start_is_not_counted():
    job = AJob()
    for rank in range(2):
        name = f"r{rank:05d}-000001.slot"
        job.say(ev.SlotAdopted(
            job=KEY, rank=rank, slot=name, capacity=4096, save=save(1), nbytes=10, world_size=2,
        ))  # fmt: skip
    job.start(committed=(save(2),))
    job.tick(3.0)
    assert counted(timings(job).histograms()) == {}


def test_protected_and_a_load_are_counted():
    cluster = a_cluster.a_protected_job()
    cluster.end_ranks()
    cluster.connect("abcd")
    cluster.load()
    found = counted(cluster.nodes["a"].job.coordinator.timings.histograms())
    assert found["protected", ""][0] == 1
    assert found[RESTORE, Tier.ARENA][0] == 1
    cluster.tick(1.0)
    assert counted(cluster.nodes["a"].job.coordinator.timings.histograms()) == found, "once"


def test_all_are_there_from_the_begin_on_so_that_the_first_one_is_an_increase():
    job = AJob().start()
    found = timings(job).histograms()
    assert [(one.what, one.tier) for one in found] == [
        ("staged", ""), ("protected", ""), ("durable", ""), (DRAIN_RATE, ""), *((RESTORE, tier) for tier in Tier)
    ]  # fmt: skip
    assert all(len(one.counts) == len(one.bounds) + 1 for one in found)


def test_counts_of_an_earlier_daemon_are_continued():
    job = AJob(slots_per_rank=8).start()
    job.stage_all(save(1))
    job.tick(1.0)
    job.drain(save(1))
    kept = timings(job).histograms()
    other = AJob().start()
    timings(other).resume(kept)
    assert counted(timings(other).histograms()) == counted(kept)


def test_the_pace_of_saves_and_of_the_store():
    job = AJob(slots_per_rank=40).start()
    assert timings(job).pace(job.now).save_every_s is None
    for number in range(1, 8):
        job.stage_all(save(number))
        job.tick(20.0)
        active = job.facts.active
        if active is not None and job.now - job.facts.records[active].drain_since >= 34.0:
            job.drain(active)
            job.tick()
    pace = timings(job).pace(job.now)
    assert (pace.save_every_s, pace.save_every_steps, pace.drain_s) == (20.0, 10, 40.0)
    assert pace.outrun == 2


def test_bounds_reach_from_a_hundredth_of_a_second_to_more_than_an_hour():
    assert (SECONDS[0], SECONDS[-1]) == (0.01, 5000.0)
