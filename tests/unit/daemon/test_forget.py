"""Giving up a job's memory by hand: never under a living rank, nor what nothing else has, unless forced."""

import pytest

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.shared.base.errors import CkptdError, UsageError
from ckptd.shared.base.ids import JobKey, SaveId
from tests.runs import RUN, STORE_ID
from tests.seals import a_seal
from tests.unit.core.a_job import KEY, AJob

ONE, TWO = SaveId(1, 1, 10, RUN), SaveId(1, 2, 20, RUN)


def a_dead_job(*saves: SaveId, drained: bool = True) -> AJob:
    job = AJob(world=2).start()
    for save in saves:
        job.stage_all(save)
        if drained:
            job.drain(save)
    for rank in range(2):
        job.gone(rank)
    job.take()
    return job


def look(*saves: SaveId, problem: str = "") -> ev.StoreScanned:
    """What lies on the store now."""
    committed = tuple(ev.OnStore(save, 2, 20, save.dirname) for save in saves)
    return ev.StoreScanned(job=KEY, store_id=STORE_ID, committed=committed, problem=problem)


def test_a_job_whose_newest_is_durable_goes_with_all_its_slots():
    job = a_dead_job(ONE)
    names = {slot.name for slot in job.node.slots}
    scan = job.catalogue.look_before_forgetting(KEY)
    assert not scan.make
    actions = job.catalogue.forget(KEY, force=False, seen=look(ONE))
    assert {a.slot for a in actions if isinstance(a, act.UnlinkSlot)} == names
    assert isinstance(actions[-1], act.ForgetJob)
    assert not job.catalogue.jobs
    assert job.catalogue.empty


def test_a_job_that_lives_is_refused_forced_or_not():
    job = AJob(world=2).start()
    for force in (False, True):
        with pytest.raises(CkptdError, match=r"rank 0 \(pid 100 on host\), rank 1 \(pid 101 on host\)"):
            job.catalogue.forget(KEY, force=force)
    job.gone(0)
    with pytest.raises(CkptdError, match="rank 1"):
        job.catalogue.forget(KEY, force=True)


def test_what_nothing_else_has_is_refused_by_name_unless_forced():
    job = a_dead_job(ONE, TWO, drained=False)
    with pytest.raises(CkptdError, match=r"step 20 .*not durable") as error:
        job.catalogue.forget(KEY, force=False)
    assert "ckptd drain --job job --wait" in error.value.hint
    assert "--force" in error.value.hint
    job.catalogue.forget(KEY, force=True)
    assert not job.catalogue.jobs


@pytest.mark.parametrize("seen", [look(), look(problem="EIO"), None], ids=["emptied", "silent", "not looked at"])
def test_what_was_durable_once_and_is_not_seen_there_now_is_refused_unless_forced(seen):
    """Somebody emptied the store, or it is not mounted: what is in memory is the only copy."""
    job = a_dead_job(ONE)
    with pytest.raises(CkptdError, match=r"step 10 .*(only|EIO)"):
        job.catalogue.forget(KEY, force=False, seen=seen)
    job.catalogue.forget(KEY, force=True)
    assert not job.catalogue.jobs


def test_a_half_that_none_has_spoken_of_since_a_restart_is_refused_unless_forced():
    """All ranks may have staged it: the other nodes are still to say so."""
    job = AJob(world=2)
    adopted = ev.SlotAdopted(
        job=KEY, rank=0, slot="r00000-000001.slot", capacity=1 << 20, world_size=2, save=TWO, nbytes=20,
        seal=a_seal(KEY, TWO),
    )  # fmt: skip
    job.catalogue.handle(adopted, 0.0)
    with pytest.raises(CkptdError, match=r"step 20 .*not durable"):
        job.catalogue.forget(KEY, force=False)
    job.catalogue.forget(KEY, force=True)


def test_what_comes_after_it_is_forgotten_harms_nothing():
    job = a_dead_job(ONE, drained=False)
    slot = job.node.slots.holding(ONE)[0].name
    job.catalogue.forget(KEY, force=True)
    for late in (
        ev.DigestsSealed(job=KEY, slot=slot, save=ONE, seal=a_seal(KEY, ONE)),
        ev.Drained(job=KEY, save=ONE),
        ev.VoteWritten(job=KEY, save=ONE),
        ev.CommitEnded(job=KEY, save=ONE, nbytes=20),
    ):
        assert job.catalogue.handle(late, 0.0) == []


def test_a_job_that_is_not_here_is_a_misuse():
    with pytest.raises(UsageError, match="no job 'other'"):
        a_dead_job(ONE).catalogue.forget(JobKey("/store", "other"), force=True)
