"""What the actions of the cores do to arenas and store, after a while, well or badly, or cut by a crash."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.shared.base.ids import JobKey, incarnation_at
from ckptd.shared.format.slot import Seal, SlotState
from ckptd.shared.protocol.parity_types import DataColumn
from ckptd.shared.protocol.topology import Topology
from tests.runs import STORE_ID
from tests.simulation import parity
from tests.simulation.arena import NoRoomError
from tests.simulation.machine import BEGAN, Machine, make
from tests.simulation.store import StoreError, run_of

if TYPE_CHECKING:
    from tests.simulation.world import World

_STORE = (
    act.TakeIncarnation,
    act.ScanStore,
    act.Drain,
    act.WriteVote,
    act.Commit,
    act.RemoveCheckpoint,
    act.RemovePartial,
    act.CopyBlock,
    act.ScrubPiece,
    act.Mend,
)
_WITH_PATIENCE = (act.TakeIncarnation, act.ScanStore)
_PATIENCE_S = 10.0
UNMOUNTED = "no store is mounted there"
_HANG_S = 300.0  # after which a worker that says nothing is replaced


@dataclass(eq=False, slots=True)
class Running:
    """An action that has begun."""

    machine: Machine
    life: int
    action: act.Action
    since: float = 0.0
    over: bool = False
    vote: tuple[int, tuple[int, ...]] = (0, ())  # made when the action begins, from the seals then


class ActionExecutor:
    """``perform`` begins an action; its outcome comes back to the same daemon life, if that still lives."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._running: dict[str, dict[int, Running]] = {}
        self._ids = itertools.count()

    def perform(self, machine: Machine, action: act.Action) -> None:
        """Begins it. The daemon may die just before, or just after."""
        crash = self._world.chaos.crash_at(machine, action)
        if crash == "before":
            machine.kill()
            return
        self._start(machine, action)
        if crash == "after":
            machine.kill()

    def _start(self, machine: Machine, action: act.Action) -> None:  # noqa: C901, PLR0912 - one line per action
        arena, job = machine.arena, action.job
        match action:
            case act.FreeSlot():
                slot = arena.slot(job, action.slot)
                assert slot is not None, f"{machine.name} frees {action.slot}, which is not there"
                self._world.promises.may_go(machine, job, slot.name)
                arena.put_seal(job, slot, Seal())
            case act.UnlinkSlot():
                if arena.slot(job, action.slot) is not None:
                    self._world.promises.may_go(machine, job, action.slot)
                    arena.unlink(job, action.slot)
            case act.KeepTopology():
                memory = arena.job(job)
                memory.kept = ev.TopologyKept(
                    job=job,
                    session=action.session,
                    topology=Topology.unpacked(action.topology.packed),
                    epoch=action.epoch,
                    since=action.since,
                    outside=action.outside,
                    former=action.former,
                )
                machine.keep(job, action.topology, action.outside)
            case act.StopEncode():
                for key, running in list(self._running.get(machine.name, {}).items()):
                    it = running.action
                    if isinstance(it, act.Encode) and (it.job, it.chunk.save, it.chunk.epoch) == (
                        job, action.save, action.epoch,
                    ):  # fmt: skip
                        del self._running[machine.name][key]
                        running.over = True
            case act.DropChunk():
                self._world.promises.may_drop(machine, job, action.save, action.epoch)
                arena.drop_chunk(job, action.save, action.epoch)
            case act.DropPulled():
                self._end_pulls(machine, action)
                pulled = arena.job(job).pulled
                for key in [key for key in pulled if key[0] == action.save]:
                    del pulled[key]
            case act.KeepNumber():
                arena.numbers[job] = action.number
            case act.RememberStore():
                arena.stores[job] = action.store_id
            case act.ForgetJob():
                arena.forget(job)
                machine.forget(job)
            case _:
                self._begin(machine, action)

    def _begin(self, machine: Machine, action: act.Action) -> None:
        world, clock = self._world, self._world.clock
        if isinstance(action, act.Encode) and any(r.action == action for r in self._of(machine)):
            return  # it runs already
        running = Running(machine, machine.life, action, clock.now)
        serial = next(self._ids)
        self._running.setdefault(machine.name, {})[serial] = running
        if isinstance(action, act.Drain) and world.store(action.job).mode not in ("silent", "unmounted"):
            world.store(action.job).make_partial(action.save)
        if isinstance(action, act.WriteVote):
            running.vote = self._make_vote(machine, action)
        late = self._written_after_s(machine, action) if isinstance(action, act.Drain) else 0.0
        late = late or world.hardware.action_s(clock, machine.name, action)
        clock.after(late, self._due, serial, running)
        if isinstance(action, act.Drain) and world.progress_s:
            clock.after(world.progress_s, self._moved, running, late)

    def _moved(self, running: Running, lasts_s: float) -> None:
        """The worker reports how much of a drain is written."""
        machine, action = running.machine, running.action
        if running.over or running.life != machine.life or machine.catalogue is None:
            return
        share = min(1.0, (self._world.clock.now - running.since) / lasts_s)
        if self._world.store(action.job).mode != "silent":
            slots = (machine.arena.slot(action.job, name) for name in action.slots)
            by_rank = tuple((slot.rank, int(share * slot.seal.image_nbytes)) for slot in slots if slot is not None)
            done = sum(nbytes for _, nbytes in by_rank)
            machine.say(make(ev.DrainMoved, job=action.job, save=action.save, nbytes_done=done, by_rank=by_rank))
        self._world.clock.after(self._world.progress_s, self._moved, running, lasts_s)

    def _written_after_s(self, machine: Machine, action: act.Drain) -> float:
        """When a store of a known speed has these slots' bytes, all nodes together; 0: it has no speed of its own."""
        if self._world.drain_s:
            return self._world.drain_s
        slots = [machine.arena.slot(action.job, name) for name in action.slots]
        nbytes = sum(slot.seal.image_nbytes for slot in slots if slot is not None)
        return self._world.store(action.job).written_after_s(self._world.clock.now, nbytes)

    def _of(self, machine: Machine) -> list[Running]:
        return list(self._running.get(machine.name, {}).values())

    def reading(self, machine: Machine, job: JobKey) -> set[str]:
        """Slots that the worker of this node reads from just now."""
        found: set[str] = set()
        for running in self._of(machine):
            if isinstance(running.action, act.Drain | act.WriteVote) and running.action.job == job:
                found |= set(running.action.slots)
        return found

    def _end_pulls(self, machine: Machine, drop: act.DropPulled) -> None:
        """What is still being pulled for the load comes to nothing."""
        for serial, running in list(self._running.get(machine.name, {}).items()):
            it = running.action
            if isinstance(it, act.PullSegments) and (it.job, it.save) == (drop.job, drop.save):
                self._world.clock.after(0.0, self._end, serial, running, "the load is over", False)

    def _due(self, serial: int, running: Running) -> None:
        if running.over or running.life != running.machine.life or running.machine.catalogue is None:
            return
        world, action = self._world, running.action
        if isinstance(action, _STORE):
            mode = world.store(action.job).mode
            if mode == "silent":
                if world.clock.now - running.since >= _HANG_S:
                    self._end(serial, running, f"the store hangs: no word from its worker for {_HANG_S:g} s", False)
                elif isinstance(action, _WITH_PATIENCE):
                    happened = world.clock.chance(0.3)
                    world.clock.after(_PATIENCE_S, self._end, serial, running, "the store is silent", happened)
                else:  # it hangs until the store is back
                    world.clock.after(world.clock.between(1, 5), self._due, serial, running)
                return
            if mode == "slow" and world.clock.chance(0.7):
                late = world.clock.between(0.5, 20)
                left = running.since + _PATIENCE_S - world.clock.now
                if isinstance(action, _WITH_PATIENCE) and late > left:  # a number that comes later is given back
                    world.clock.after(max(0.0, left), self._end, serial, running, "the store is slow", False)
                    return
                world.clock.after(late, self._due, serial, running)
                return
            if mode == "unmounted":
                self._end(serial, running, UNMOUNTED, False)
                return
            failing = mode == "failing" and world.clock.chance(0.7)
        else:
            failing = world.chaos.fails(action)
        happened = failing and isinstance(action, _STORE) and world.clock.chance(0.3)
        self._end(serial, running, "EIO: simulated" if failing else "", happened)

    def _end(self, serial: int, running: Running, problem: str, happened: bool) -> None:
        """Problem or not, the effect may be there; the outcome says what the daemon can know."""
        if running.over or running.life != running.machine.life or running.machine.catalogue is None:
            return
        running.over = True
        self._running[running.machine.name].pop(serial, None)
        for event in self._outcome(running, problem, happened):
            running.machine.say(event)

    def cut(self, machine: Machine) -> None:
        """The daemon died: what was under way happened, or did not."""
        for running in self._running.pop(machine.name, {}).values():
            running.over = True
            modes = ("silent", "unmounted")
            silent = isinstance(running.action, _STORE) and self._world.store(running.action.job).mode in modes
            if not silent and self._world.clock.chance(0.5):
                self._outcome(running, "", True)

    def _outcome(self, running: Running, problem: str, happened: bool) -> list[Any]:
        machine, action, found = running.machine, running.action, None
        if not problem or happened:
            try:
                if isinstance(action, act.WriteVote):
                    self._world.store(action.job).vote(action.save, machine.name, *running.vote)
                else:
                    found = _EFFECTS[type(action)](self, machine, action)
            except StoreError as error:
                problem = problem or str(error)
            except NoRoomError as error:
                self._world.counts["refused for the budget"] += 1
                problem = problem or f"budget: {error}"
        if problem and isinstance(action, act.TakeIncarnation):
            found = incarnation_at(BEGAN + self._world.clock.now)
        return _EVENTS[type(action)](action, problem, found)

    # --- what each does; raises StoreError

    def _allocate(self, machine: Machine, action: act.AllocateSlots) -> list[str]:
        spare = machine.arena.nbytes_of(action.job, action.instead)
        machine.arena.make_room(action.count * action.capacity - spare)
        return [machine.arena.allocate(action.job, action.rank, action.capacity).name for _ in range(action.count)]

    def _digest(self, machine: Machine, action: act.TakeDigests) -> Seal | None:
        slot = machine.arena.slot(action.job, action.slot)
        if slot is None or slot.save != action.save:
            return None
        seal = msgspec.structs.replace(slot.seal, state=SlotState.DIGESTED, table_digest=slot.seal.leaves_digest)
        machine.arena.put_seal(action.job, slot, seal)
        return seal

    def _encode(self, machine: Machine, action: act.Encode) -> None:
        chunk = action.chunk
        assert chunk.columns[chunk.index].node == machine.name, f"{machine.name} encodes for another member"
        if machine.arena.job(action.job).chunks.get((chunk.save, chunk.epoch)) is not None:
            return
        for column in chunk.columns:
            for seal in column.seals:
                self._reach(machine, action.job, column.node, seal)
        machine.arena.put_chunk(action.job, chunk)

    def _reach(self, machine: Machine, job: JobKey, node: str, seal: Seal) -> Seal:
        """The seal of that very segment at the node, if bytes can be pulled from it now."""
        other = self._world.nodes.get(node)
        if other is None or not other.up or not self._world.network.connected(machine.name, node, job):
            raise StoreError(f"{node} cannot be reached")
        slot = other.arena.holding(job, seal.rank, seal.save) if seal.save is not None else None
        if slot is None or slot.seal != seal or seal.state is not SlotState.DIGESTED:
            raise StoreError(f"{node} does not have that segment of rank {seal.rank}")
        return slot.seal

    def _fetch(self, machine: Machine, action: act.FetchSegment) -> tuple[str, Seal]:
        job = action.job
        if action.chunk is None:
            assert action.seal is not None, f"{machine.name} fetches rank {action.rank} without its seal"
            seal = self._reach(machine, job, action.holder, action.seal)
        else:
            seal = self._rebuild(machine, action)
        slot = machine.arena.holding(job, action.rank, action.save)
        if slot is None:
            machine.arena.make_room(seal.content_nbytes + 8192)
            slot = machine.arena.allocate(job, action.rank, seal.content_nbytes + 8192)
            machine.arena.put_seal(job, slot, seal)
        self._world.scrubs.rebuilt(machine, job, slot)
        return slot.name, seal

    def _pull(self, machine: Machine, action: act.PullSegments) -> tuple[dict[int, str], dict[int, str]]:
        files, lacks, pulled = dict[int, str](), dict[int, str](), machine.arena.job(action.job).pulled
        for pull in action.pulls:
            rank = pull.seal.rank
            try:
                seal = self._reach(machine, action.job, pull.holder, pull.seal)
            except StoreError as error:
                lacks[rank] = str(error)
                continue
            if (action.save, rank) not in pulled:
                machine.arena.make_room(seal.content_nbytes)
            pulled[action.save, rank] = seal
            files[rank] = f"r{rank:05d}-000001.part"
        return files, lacks

    def _rebuild(self, machine: Machine, action: act.FetchSegment) -> Seal:
        chunk, job, homes = action.chunk, action.job, dict(action.homes)
        assert chunk is not None
        assert chunk.save == action.save

        def has(column: DataColumn) -> bool:
            try:
                for seal in column.seals:
                    self._reach(machine, job, homes.get(seal.rank, column.node), seal)
            except StoreError:
                return False
            return True

        def has_parity(member: int) -> bool:
            node = self._world.nodes.get(dict(action.chunks).get(member, ""))
            if node is None or not node.up or not self._world.network.connected(machine.name, node.name, job):
                return False
            there = node.arena.job(job).chunks.get((chunk.save, chunk.epoch))
            return there is not None and there.index == member and there.columns == chunk.columns

        wanted = next((i for i, c in enumerate(chunk.columns) if action.rank in (s.rank for s in c.seals)), None)
        if wanted is None:
            raise StoreError(f"no column has rank {action.rank}")
        count = len(chunk.columns)
        columns = [has(column) for column in chunk.columns]
        parities = [has_parity(member) for member in range(count)]
        if not columns[wanted] and not parity.solvable(chunk.scheme, columns, parities, wanted):
            raise StoreError(f"too much of the set is missing: columns {columns}, parity {parities}")
        return next(seal for seal in chunk.columns[wanted].seals if seal.rank == action.rank)

    def _drain(self, machine: Machine, action: act.Drain) -> bool:
        store, files = self._world.store(action.job), {}
        if action.save in store.committed:
            return True
        for name in action.slots:
            slot = machine.arena.slot(action.job, name)
            if slot is None or slot.save != action.save:
                raise StoreError(f"slot-changed: {name} holds {slot.save if slot else 'nothing'}")
            files[slot.rank] = slot.seal.leaves_digest
        store.write(action.save, files)
        return False

    def _make_vote(self, machine: Machine, action: act.WriteVote) -> tuple[int, tuple[int, ...]]:
        slots = [machine.arena.slot(action.job, name) for name in action.slots]
        good = [s for s in slots if s is not None and s.save == action.save and s.seal.state is SlotState.DIGESTED]
        assert len(good) == len(slots), f"{machine.name} votes for {action.save} with slots that do not hold it"
        return good[0].seal.world_size, tuple(s.rank for s in good)

    def _take(self, machine: Machine, action: act.TakeIncarnation) -> int:
        return self._world.store(action.job).take(action.at_least, BEGAN + self._world.clock.now, action.session)

    def _scan(self, machine: Machine, action: act.ScanStore) -> Any:
        store, claim = self._world.store(action.job), action.claim
        lost = claim is not None and not store.claim(claim.incarnation, claim.run, claim.session)
        return (*store.scan(), lost)

    def _commit(self, machine: Machine, action: act.Commit) -> int:
        store = self._world.store(action.job)
        store.commit(action.save)
        self._world.promises.committed(action.job, action.save)
        return store.taken_over(action.save, action.incarnation, action.session, action.void)

    def _remove(self, machine: Machine, action: act.RemoveCheckpoint) -> bool:
        return self._world.store(action.job).remove(action.save)

    def _remove_partial(self, machine: Machine, action: act.RemovePartial) -> None:
        self._world.store(action.job).remove_partial(action.save)

    def _scrub(self, machine: Machine, action: act.Action) -> dict[str, Any]:
        scrubs = self._world.scrubs
        match action:
            case act.ScrubBlock():
                return scrubs.block(machine, action)
            case act.CopyBlock():
                return scrubs.copy(machine, action)
            case act.ScrubPiece():
                return scrubs.piece(machine, action)
            case act.Mend():
                return scrubs.mend(machine, action)
        raise AssertionError(action)


def _scrubbed(kind: type[Any], *named: str, **failed: Any) -> Callable[[Any, str, Any], list[Any]]:
    """Of a scrub. named: fields of the action that its event has too. failed: its fields when it failed."""

    def made(action: Any, problem: str, found: Any) -> list[Any]:
        said = {name: getattr(action, name) for name in ("job", "save", *named)}
        return [make(kind, **said, **(failed | {"problem": problem} if problem else found))]

    return made


def _allocated(action: act.AllocateSlots, problem: str, found: Any) -> list[Any]:
    job, rank = action.job, action.rank
    if problem:
        return [make(ev.SlotsFailed, job=job, rank=rank, count=action.count, code="os", message=problem, hint="")]
    ready = [make(ev.SlotReady, job=job, rank=rank, slot=name, capacity=action.capacity) for name in found]
    return [make(ev.SlotsFit, job=job, rank=rank), *ready] if action.instead else ready


def _digested(action: act.TakeDigests, problem: str, found: Any) -> list[Any]:
    if problem:  # tried again until it works
        return []
    return [make(ev.DigestsSealed, job=action.job, slot=action.slot, save=action.save, seal=found)] if found else []


def _fetched(action: act.FetchSegment, problem: str, found: Any) -> list[Any]:
    said: dict[str, Any] = {"job": action.job, "rank": action.rank, "save": action.save, "tier": action.tier}
    if problem or found is None:
        return [make(ev.SegmentFetched, **said, problem=problem)]
    name, seal = found
    return [make(ev.SegmentFetched, **said, slot=name, capacity=seal.content_nbytes + 8192, seal=seal)]


def _pulled(action: act.PullSegments, problem: str, found: Any) -> list[Any]:
    said: dict[str, Any] = {name: getattr(action, name) for name in ("job", "rank", "session", "request", "save")}
    files, lacks = found or ({}, {})
    return [
        make(
            ev.SegmentsPulled,
            **said,
            files=() if problem else tuple(files.items()),
            lacks=() if problem else tuple(lacks.items()),
            refused=problem,
        )
    ]


def _scanned(action: act.ScanStore, problem: str, found: Any) -> list[Any]:
    if problem == UNMOUNTED and not action.remembered and not action.wanted:  # nor was one made yet, as far as is known
        return [make(ev.StoreScanned, job=action.job, after=action.after)]
    if problem:
        return [make(ev.StoreScanned, job=action.job, after=action.after, problem=problem)]
    return [
        make(
            ev.StoreScanned,
            job=action.job,
            store_id=STORE_ID,
            after=action.after,
            committed=found[0],
            partials=found[1],
            records=found[2],
            claimed=action.claim.incarnation if action.claim is not None else 0,
            lost=found[3],
        )
    ]


def _plain(kind: type[Any], **more: Any) -> Callable[[Any, str, Any], list[Any]]:
    return lambda action, problem, found: [make(kind, job=action.job, save=action.save, problem=problem, **more)]


_EFFECTS: dict[type[Any], Any] = {
    act.AllocateSlots: ActionExecutor._allocate, act.TakeDigests: ActionExecutor._digest,
    act.Encode: ActionExecutor._encode, act.FetchSegment: ActionExecutor._fetch, act.Drain: ActionExecutor._drain,
    act.WriteVote: None, act.PullSegments: ActionExecutor._pull,
    act.TakeIncarnation: ActionExecutor._take, act.ScanStore: ActionExecutor._scan, act.Commit: ActionExecutor._commit,
    act.RemoveCheckpoint: ActionExecutor._remove, act.RemovePartial: ActionExecutor._remove_partial,
    **dict.fromkeys((act.ScrubBlock, act.CopyBlock, act.ScrubPiece, act.Mend), ActionExecutor._scrub),
}  # fmt: skip
_EVENTS: dict[type[Any], Callable[[Any, str, Any], list[Any]]] = {
    act.AllocateSlots: _allocated,
    act.TakeDigests: _digested,
    act.Encode: lambda a, problem, _: [
        make(ev.Encoded, job=a.job, save=a.chunk.save, epoch=a.chunk.epoch, problem=problem)
    ],
    act.FetchSegment: _fetched,
    act.PullSegments: _pulled,
    act.Drain: lambda a, problem, found: [
        make(ev.Drained, job=a.job, save=a.save, problem=problem, committed=bool(found) and not problem)
    ],
    act.WriteVote: _plain(ev.VoteWritten),
    act.TakeIncarnation: lambda a, problem, found: [
        make(
            ev.IncarnationTaken,
            job=a.job,
            session=a.session,
            number=found,
            run=run_of(a.session, a.at_least),
            problem=problem,
            hopeless=problem == UNMOUNTED and bool(a.remembered),
        )
    ],
    act.ScanStore: _scanned,
    act.Commit: lambda a, problem, found: [
        make(ev.CommitEnded, job=a.job, save=a.save, nbytes=10, taken_over=0 if problem else found, problem=problem)
    ],
    act.RemoveCheckpoint: lambda a, problem, gone: [
        make(ev.CheckpointRemoved, job=a.job, save=a.save, problem=problem, pinned=not problem and not gone)
    ],
    act.RemovePartial: lambda *_: [],
    act.ScrubBlock: lambda a, _, found: [make(ev.BlockScrubbed, job=a.job, name=a.name, save=a.save, **found)],
    act.CopyBlock: _scrubbed(ev.BlockCopied, "name"),
    act.ScrubPiece: _scrubbed(ev.PieceScrubbed),
    act.Mend: lambda a, problem, found: _scrubbed(ev.MendEnded, "number", lost=a.ranks)(a, problem, found),
}
