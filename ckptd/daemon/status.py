"""The status a daemon gives of itself, read off the catalogue. Changes nothing."""

import time
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from ckptd.core.coordinator.protection_view import NodeView, ProtectionView, view_of
from ckptd.core.coordinator.restore_states import Loading
from ckptd.core.coordinator.save_record import Record
from ckptd.core.coordinator.save_states import ON_STORE_WAY, State
from ckptd.core.jobs import Catalogue, Job
from ckptd.history.account import Account
from ckptd.shared.base.ids import JobKey
from ckptd.shared.base.wording import runs
from ckptd.shared.protocol.messages import Milestone
from ckptd.shared.protocol.status import (
    MAX_RANKS,
    MAX_RUNS,
    CheckpointStatus,
    DamageStatus,
    DrainStatus,
    JobStatus,
    NodeStatus,
    RankStatus,
    RestoreStatus,
    ScrubStatus,
)

_MAX_CHECKPOINTS, _MAX_DAMAGED = 32, 32


def jobs(
    jobs: Mapping[JobKey, Job],
    now: float,
    errors: Mapping[JobKey, list[str]],
    account: Callable[[JobKey], Account | None] = lambda _: None,
) -> list[JobStatus]:
    """One entry per job, by name. ``now`` is the catalogue's clock. account: of a job, by what is on record."""
    return [_job(key, job, now, errors.get(key, []), account(key)) for key, job in sorted(jobs.items())]


def _job(key: JobKey, job: Job, now: float, errors: list[str], account: Account | None) -> JobStatus:
    view = _protection(job)
    coordinates = job.node.coordinator == job.node.node
    account = account if coordinates else None
    ends = account.ends if account is not None else job.coordinator.facts.ends
    seen = job.coordinator.facts.ready or not coordinates
    return JobStatus(
        job=key.job,
        store=key.store,
        incarnation=job.coordinator.sessions.incarnation,
        world_size=job.coordinator.sessions.world_size,
        ranks=ranks(job),
        checkpoints=_shown(checkpoints(job, now, view)),
        drain=_drain(job, now),
        errors=list(errors),
        scheme=str(view.scheme),
        set_size=view.set_size,
        coordinator=view.coordinator,
        nodes=_nodes(view, job),
        degraded=list(view.degraded),
        preempt_step=_preempt_step(job),
        store_seen=seen,
        store_problem="" if seen else job.coordinator.facts.store_problem,
        ends={str(end): count for end, count in sorted(ends.items()) if count},
        restore=_restore(job, now),
        pace=job.coordinator.timings.pace(now) if coordinates else None,
        histograms=account.histograms.shown() if account is not None else [],
        goodput=account.goodput(time.time()) if account is not None else None,
        totals=account.totals() if account is not None else None,
        scrub=_scrub(job, now),
    )


def _scrub(job: Job, now: float) -> ScrubStatus | None:
    scrub, damaged = job.scrub, job.scrub.damaged
    if not scrub.on and not damaged:
        return None
    memory, store = (None if last is None else round(now - last, 3) for last in (scrub.memory.last, scrub.store.last))
    return ScrubStatus(
        memory_nbytes=scrub.memory.nbytes,
        memory_age_s=memory,
        store_nbytes=scrub.store.nbytes,
        store_age_s=store,
        found=scrub.findings.found,
        mended=scrub.findings.mended,
        damaged=[
            DamageStatus(node=spot.node, tier=spot.tier, step=spot.save.step, rank=spot.rank, what=found.what)
            for spot, found in damaged[:_MAX_DAMAGED]
        ],
    )


def _restore(job: Job, now: float) -> RestoreStatus | None:
    load = job.coordinator.restores.running
    if load is None:
        return None
    there = load.reported if load.state is Loading.READING else load.asked
    missing = set(range(job.coordinator.sessions.world_size)) - there
    return RestoreStatus(
        phase=str(load.state),
        seconds=round(now - load.since, 3),
        step=load.choice.step if load.choice is not None else None,
        ranks=len(there),
        missing=runs(missing)[:MAX_RUNS],
    )


def _preempt_step(job: Job) -> int | None:
    """As the coordinator knows it; on other nodes, as it was announced here."""
    if job.node.coordinator == job.node.node:
        return job.coordinator.preemption.shown(job.coordinator.sessions.living)
    return job.node.notice.shown(job.node.membership.session)


def _shown(found: list[CheckpointStatus]) -> list[CheckpointStatus]:
    """The newest, and of those that are durable or protected one at least, however old it is."""
    shown, rest = found[:_MAX_CHECKPOINTS], found[_MAX_CHECKPOINTS:]
    durable = [c for c in rest if c.milestone == Milestone.DURABLE][
        : not any(c.milestone == Milestone.DURABLE for c in shown)
    ]
    protected = [c for c in rest if c.protected][: not any(c.protected for c in shown)]
    return [c for c in found if c in shown or c in durable or c in protected] if durable or protected else shown


def _protection(job: Job) -> ProtectionView:
    """What the coordinator's half knows of all nodes; elsewhere, their names and which of them answer this one."""
    view = job.coordinator.view()
    if view is not None:
        return view
    member = job.node.membership
    if member.topology is not None:
        known = view_of(member.topology, unreachable=member.down)
        return replace(known, coordinator=member.coordinator, degraded=())
    here = NodeView(job.node.node, "", sorted(job.node.ranks.admitted), True, 0, None)
    return ProtectionView(coordinator=job.node.coordinator, nodes=(here,))


def draining(job: Job) -> Record | None:
    """The save that is written to the store now."""
    saves = job.coordinator.facts
    return saves.records.get(saves.active) if saves.active is not None else None


def drainers(job: Job) -> list[str]:
    """Other nodes that write their share of the drain that runs, if this one coordinates it."""
    record = draining(job)
    return sorted(set(record.drainers) - record.voters - {job.node.node}) if record is not None else []


def _share(job: Job, record: Record, node: str) -> tuple[int, int]:
    """Bytes of the node's share, and those written as far as they are known here: of others only when they voted."""
    share = record.writes.get(node, 0)
    if node in record.voters:
        return share, share
    here = job.node.drain if node == job.node.node else None
    done = sum(here.done.values()) if here is not None and here.save == record.save else 0
    return share, min(done, share)


def _written(job: Job, record: Record) -> int:
    known = record.voters | ({job.node.node} & record.drainers.keys())
    return sum(_share(job, record, node)[1] for node in known)


def _nodes(view: ProtectionView, job: Job) -> list[NodeStatus]:
    """One object for each of maybe thousands of nodes, and no more: the loop stands meanwhile."""
    record = draining(job)
    writes, voters = (record.writes, record.voters) if record is not None else ({}, set())
    found = [
        NodeStatus(
            node=one.node, domain=one.domain, ranks=one.ranks, reachable=one.reachable, set_index=one.set_index,
            encoded_step=one.encoded_step, problem=one.problem, drain_nbytes=writes.get(one.node, 0),
            drain_nbytes_done=writes[one.node] if one.node in voters else 0, drain_voted=one.node in voters,
        )
        for one in view.nodes
    ]  # fmt: skip
    if record is not None and job.node.node not in voters:
        done = _share(job, record, job.node.node)[1]
        found = [replace(one, drain_nbytes_done=done) if one.node == job.node.node else one for one in found]
    return found


def checkpoints(job: Job, now: float, view: ProtectionView | None = None) -> list[CheckpointStatus]:
    """Every save that is on its way, in memory or on the store, newest first. view: of the job, if that is made."""
    saves, protected = job.coordinator.facts, (view or _protection(job)).protected
    out = {
        save: _of_record(record, save in saves.on_store, save in protected, now)
        for save, record in saves.records.items()
    }
    for save, found in saves.on_store.items():
        if save not in out:
            out[save] = CheckpointStatus(
                step=save.step,
                incarnation=save.incarnation,
                counter=save.counter,
                phase="durable",
                milestone="durable",
                end="durable",
                reason="",
                tiers=["pfs"],
                ranks=found.world_size,
                world_size=found.world_size,
                nbytes=found.nbytes,
                age_s=None,
                protected=save in protected,
                replicas=found.compared,
                run=save.run.hex(),
            )
    return [out[save] for save in sorted(out, key=lambda save: save.listed, reverse=True)]


def _of_record(record: Record, on_store: bool, protected: bool, now: float) -> CheckpointStatus:
    tiers = (["arena"] if record.staged and record.in_memory else []) + (["pfs"] if on_store else [])
    return CheckpointStatus(
        step=record.save.step,
        incarnation=record.save.incarnation,
        counter=record.save.counter,
        phase="staged" if record.state is State.QUEUED else str(record.state),
        milestone=str(record.milestone) if record.milestone else None,
        end=str(record.end) if record.end else None,
        reason=record.why or record.error,
        tiers=tiers,
        ranks=len(record.delivered) or (record.world_size if on_store else 0),
        world_size=record.world_size,
        nbytes=record.nbytes,
        age_s=round(now - record.since, 3),
        protected=protected,
        replicas=record.compared,
        run=record.save.run.hex(),
        missing=record.missing_runs(MAX_RUNS) if record.state is State.STAGING else [],
    )


def _drain(job: Job, now: float) -> DrainStatus | None:
    saves, record = job.coordinator.facts, draining(job)
    done = _written(job, record) if record is not None else 0
    if record is None:
        waiting = [r for r in saves.of(State.QUEUED) if r.error]
        record = max(waiting, key=lambda r: r.save, default=None)
    if record is None:
        return None
    seconds = record.drained_s(now)
    running, last = record.state in ON_STORE_WAY, saves.last_drain
    rate = done / seconds if seconds else 0.0
    expected = rate or (last.bytes_per_s if last is not None else 0.0)
    return DrainStatus(
        save=record.save,
        nbytes=record.nbytes,
        nbytes_done=done,
        seconds=round(seconds, 3),
        bytes_per_s=round(rate, 1) if running else 0.0,
        seconds_left=round((record.nbytes - done) / expected, 3) if running and expected > 0 else None,
        attempt=record.failures + 1,
        last_error=record.error,
        retry_in_s=None if saves.retry_at is None else round(max(saves.retry_at - now, 0.0), 3),
    )


def ranks(job: Job) -> list[RankStatus]:
    """Ranks that are attached here, or whose slots still are; as many as a status has room for."""
    out = []
    written = {slot.rank: slot.nbytes for slot in job.node.drain.share()}
    for rank in sorted({slot.rank for slot in job.node.slots} | set(job.node.ranks.admitted)):
        slots = job.node.slots.of_rank(rank)
        local, unattached = job.node.ranks.admitted.get(rank), job.node.ranks.unattached(rank)
        held = [slot.save for slot in slots if slot.save is not None]
        out.append(
            RankStatus(
                rank=rank,
                host=local.host if local else unattached.host if unattached else "",
                pid=local.pid if local else unattached.pid if unattached else 0,
                alive=unattached is not None or (local is not None and (rank, local.session) in job.node.ranks.live),
                attached=unattached is None,
                slots=len(slots),
                slots_in_use=len(held),
                slot_nbytes=max((slot.capacity for slot in slots), default=0),
                newest_step=max(held).step if held else None,
                late=local.late if local else "",
                drain_nbytes=written.get(rank, 0),
                drain_nbytes_done=min(job.node.drain.done.get(rank, 0), written.get(rank, 0)),
            )
        )
    return out[:MAX_RANKS]


def one_line(catalogue: Catalogue) -> str:
    """For systemctl status: each job's newest safe step and the drain that runs."""
    words = []
    for key, job in sorted(catalogue.jobs.items()):
        saves = job.coordinator.facts
        staged = saves.newest_staged
        word = f"{key.job}: staged {staged.save.step if staged else '-'}"
        word += f", durable {max(saves.on_store).step if saves.on_store else '-'}"
        if (record := draining(job)) is not None:
            share, done = _share(job, record, job.node.node)
            word += f", draining {record.save.step}"
            word += f", {100 * done // share} % of this node's share" if share else ""
        words.append(word)
    return "; ".join(words) or "no jobs"
