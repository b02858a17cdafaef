"""The rows of the speed budget (docs, design section 9) for one rank on one node, each beside its yardstick."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from bench import states, victim
from bench.measure import Sample, Series, descendants, interleave, own_memory_nbytes, running_cpu_s, seconds, tree_cpu_s
from bench.node import Client, Node
from bench.report import Row, ratio
from bench.training import Touching, Training
from bench.yardsticks import Yardsticks
from ckptd.shared.base.ids import file_name

_STAGED_TIMEOUT_S = 60.0
_DURABLE_TIMEOUT_S = 180.0
_LATE_SAVES = 5  # consecutive equal ones
_LATE_TIMEOUT_S = 60.0
_SETTLED_SAVES = 3  # one per slot: after these, every slot has been written once
_QUIET_STEPS = 12
_IDLE_S = 5.0
_FORWARD_BACKWARD_STEPS = 12  # longer than a copy of the state
MANY_COUNT, MANY_NBYTES = 10_000, 16 << 10


@dataclass(slots=True)
class Bench:
    """The common part of the rows: a node, the yardsticks, one realistic state of about asked_nbytes."""

    node: Node
    yardsticks: Yardsticks
    state: states.State
    asked_nbytes: int
    repeat: int
    last_step: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return states.nbytes_of(self.state)

    def next_step(self) -> int:
        """A step number not used before."""
        self.last_step += 1
        return self.last_step


@dataclass(frozen=True, slots=True)
class Saved:
    """Seconds of one save: the call, staged to durable, call to durable. CPU seconds are of all."""

    stall: Sample
    drain: Sample
    total: Sample


def save(bench: Bench, client: Client, state: states.State) -> Saved:
    """Mutates and saves a state, and waits until it is durable."""
    step = bench.next_step()
    states.mutate(state, step)
    cpu = [tree_cpu_s()]
    start = time.perf_counter()
    handle = client.save(state, step)
    returned = time.perf_counter()
    handle.wait("staged", _STAGED_TIMEOUT_S)
    staged = time.perf_counter()
    handle.wait("durable", _DURABLE_TIMEOUT_S)
    durable = time.perf_counter()
    cpu.append(tree_cpu_s())
    spent = cpu[1] - cpu[0]
    return Saved(Sample(returned - start, spent), Sample(durable - staged, spent), Sample(durable - start, spent))


def steady(bench: Bench) -> list[Row]:
    """Saves of the realistic state in a steady loop: stall, drain rate, and the daemon's footprint afterwards."""
    sticks = bench.yardsticks
    with bench.node.client("steady") as client:
        client.prepare(bench.state)
        for _ in range(_SETTLED_SAVES):
            save(bench, client, bench.state)
        marks, saves = interleave(
            bench.repeat,
            lambda: (sticks.warm_copy(), sticks.direct_write()),
            lambda: save(bench, client, bench.state),
        )
        footprint = _footprint(bench.node)
    copies, writes = (seconds(list(samples)) for samples in zip(*marks, strict=True))
    stall, drain, total = (seconds([getattr(one, part) for one in saves]) for part in ("stall", "drain", "total"))
    return [
        ratio("stall of a synchronous save, steady", stall, copies, "one plain copy into warm memory", bar=1.10),
        ratio(
            "staged -> durable, digests on",
            drain.rate(bench.nbytes),
            writes.rate(sticks.nbytes),
            sticks.write_name,
            bar=0.9,
            sense=">=",
        ),
        ratio("save call -> durable", total, writes, sticks.write_name),
        *footprint,
    ]


def many_tensors(bench: Bench) -> list[Row]:
    """10,000 small tensors: what a save costs beyond copying them one by one."""
    state = states.many(MANY_COUNT, MANY_NBYTES)
    loop = bench.yardsticks.tensor_copies(list(states.tensors(state)))
    with bench.node.client("many") as client:
        client.prepare(state)
        for _ in range(_SETTLED_SAVES):
            save(bench, client, state)
        marks, saves = interleave(bench.repeat, loop, lambda: save(bench, client, state))
    stall, copies = seconds([one.stall for one in saves]).scaled(1e3, "ms"), seconds(marks).scaled(1e3, "ms")
    return [
        Row(
            f"{MANY_COUNT:,} tensors of 16 KiB: save beyond the copies",
            stall,
            stall.median - copies.median,
            "ms",
            copies,
            "a loop of plain per-tensor copies",
            bar=20,
        )
    ]


def cold(bench: Bench) -> list[Row]:
    """A node lost and replaced, again and again: daemon start, restore from the store, first save after prepare.

    The yardstick reads the very file that is restored, and both after one more read of it: disks below disks remember
    what was read last, and another file may lie elsewhere.
    """
    sticks = bench.yardsticks
    with bench.node.client("cold") as client:
        client.prepare(bench.state)
        save(bench, client, bench.state)
    drained = bench.node.store / "cold" / "latest" / file_name(0)
    ready: list[float] = []
    firsts: list[Sample] = []
    settled: list[Sample] = []

    def lose_node() -> Sample:
        bench.node.stop()
        ready.append(bench.node.start())
        with bench.node.client("cold") as client:
            restored = _restore(client, bench.state, states.fingerprint(bench.state), "pfs")
            client.prepare(bench.state)
            saves = [save(bench, client, bench.state).stall for _ in range(_SETTLED_SAVES + 2)]
        firsts.append(saves[0])
        settled.extend(saves[_SETTLED_SAVES:])
        return restored

    def read_again() -> Sample:
        sticks.direct_read(path=drained)
        return sticks.direct_read(path=drained)

    marks, restores = interleave(bench.repeat, read_again, lose_node)
    return [
        ratio("first save after prepare", seconds(firsts), seconds(settled), "the same client's later saves", bar=1.3),
        ratio(
            "restore from the store, digests checked",
            seconds(restores).rate(bench.nbytes),
            seconds(marks).rate(sticks.nbytes),
            f"{sticks.read_name}, of the same file",
            bar=0.9,
            sense=">=",
        ),
        _absolute("daemon: start to ready", Series("s", tuple(ready)), 0.5),
    ]


def first(bench: Bench) -> list[Row]:
    """First saves on nodes that have allocated no memory: after some seconds of training after a load, and at once."""
    loaded: list[Sample] = []
    bare: list[Sample] = []
    settled: list[Sample] = []
    for turn in range(bench.repeat):
        for found in (loaded, bare):
            bench.node.stop()
            bench.node.start()
            with bench.node.client(f"first-{turn}-{'loaded' if found is loaded else 'bare'}") as client:
                if found is loaded:
                    client.load(bench.state)
                    time.sleep(_IDLE_S)
                saves = [save(bench, client, bench.state).stall for _ in range(_SETTLED_SAVES + 2)]
            found.append(saves[0])
            settled.extend(saves[_SETTLED_SAVES:])
    name = "the same clients' later saves"
    return [
        ratio("first save 5 s after `load`", seconds(loaded), seconds(settled), name, bar=1.3),
        ratio("first save without `load` or `prepare`", seconds(bare), seconds(settled), name),
    ]


def arena_restore(bench: Bench) -> list[Row]:
    """A trainer that is killed and started again while the daemon runs."""
    sticks = bench.yardsticks

    def restart() -> Sample:
        saved = victim.crash("restore", bench.node.store, bench.node.arena, bench.asked_nbytes)
        with bench.node.client("restore") as client:
            return _restore(client, bench.state, saved, "arena")

    marks, restores = interleave(bench.repeat, sticks.warm_copy, restart)
    return [
        ratio(
            "restore from the arena, digests checked",
            seconds(restores).rate(bench.nbytes),
            seconds(marks).rate(sticks.nbytes),
            "one plain copy into warm memory",
            bar=0.8,
            sense=">=",
        )
    ]


def drain_slowdown(bench: Bench, training: Training) -> list[Row]:
    """Training steps between staged and durable, compared with undisturbed ones."""
    with bench.node.client("slowdown") as client:
        client.prepare(bench.state)
        save(bench, client, bench.state)

        def draining() -> list[float]:
            step = bench.next_step()
            states.mutate(bench.state, step)
            handle = client.save(bench.state, step)
            handle.wait("staged", _STAGED_TIMEOUT_S)
            deadline = time.monotonic() + _DURABLE_TIMEOUT_S
            steps = [training.step()]
            while handle.milestone != "durable" and time.monotonic() < deadline:
                steps.append(training.step())
            handle.wait("durable", 0)
            return steps

        quiet, busy = interleave(bench.repeat, lambda: training.steps(_QUIET_STEPS), draining)
    measured, undisturbed = (
        Series("ms", tuple(1e3 * sum(steps) / len(steps) for steps in runs)) for runs in (busy, quiet)
    )
    return [ratio("training step while draining", measured, undisturbed, "the same step, undisturbed", bar=1.05)]


def overlapped(bench: Bench, training: Training) -> list[Row]:
    """Saves that an attached optimizer's forward and backward hide: 2 GiB, and many small tensors."""
    rows = []
    for name, state in (("2 GiB", bench.state), (f"{MANY_COUNT:,} tensors", states.many(MANY_COUNT, MANY_NBYTES))):
        count = sum(1 for _ in states.tensors(state))
        stalls = Series("ms", tuple(1e3 * stall for stall in _overlapped_stalls(bench, training, state)))
        bar = 10 + 2e-3 * count
        rows.append(Row(f"stall of an overlapped save, {name}", stalls, stalls.median, "ms", bar=bar))
    return rows


def await_late(client: Client, save: Callable[[], object]) -> None:
    """Saves until late copies are constant: pages are collapsed in the background, and shared ones watched."""
    deadline, same = time.monotonic() + _LATE_TIMEOUT_S, 0
    while time.monotonic() < deadline and same < _LATE_SAVES:
        before = client.stats().last_late_nbytes
        save()
        late = client.stats().last_late_nbytes
        same = same + 1 if late and late == before else 0
        time.sleep(0.2)


def _overlapped_stalls(bench: Bench, training: Training, state: states.State) -> list[float]:
    """Seconds by which save and the hook of the next step delayed training, without the first saves."""
    optimizer = Touching(states.tensors(state))
    stalls = []
    with bench.node.client("overlap") as client:
        client.prepare(state)
        client.attach(optimizer)
        await_late(client, lambda: client.save(state, bench.next_step()).wait("durable", _DURABLE_TIMEOUT_S))
        for _ in range(_SETTLED_SAVES + bench.repeat):
            handle = client.save(state, bench.next_step())
            training.steps(_FORWARD_BACKWARD_STEPS)
            optimizer.step()
            handle.wait("durable", _DURABLE_TIMEOUT_S)
            stalls.append(handle.stall_s)
    return stalls[_SETTLED_SAVES:]


def _restore(client: Client, state: states.State, saved: str, tier: str) -> Sample:
    """Loads over a cleared state and checks the bytes and the tier."""
    states.clear(state)
    cpu_s = tree_cpu_s()
    start = time.perf_counter()
    restored = client.load(state)
    sample = Sample(time.perf_counter() - start, tree_cpu_s() - cpu_s)
    if restored is None or restored.tier != tier:
        raise RuntimeError(f"restored {restored}, expected the tier {tier}")
    if states.fingerprint(state) != saved:
        raise RuntimeError(f"the bytes restored from {tier} differ from those that were saved")
    return sample


def _footprint(node: Node) -> list[Row]:
    """Memory and idle CPU of the daemon and its workers, right after they have worked."""
    daemon, *workers = descendants(node.pid)
    mib = [own_memory_nbytes(pid) / 2**20 for pid in (daemon, *workers)]
    start = running_cpu_s(daemon)
    time.sleep(_IDLE_S)
    idle = 100 * (running_cpu_s(daemon) - start) / _IDLE_S
    rows = [_absolute("daemon: own memory", Series("MiB", (mib[0],)), 80)]
    if workers:
        rows.append(_absolute("daemon: own memory of a worker", Series("MiB", tuple(mib[1:])), 50))
    note = "0 % means below half a per cent"
    return [*rows, _absolute("daemon and workers: CPU when idle", Series("%", (idle,)), 0.5, note)]


def _absolute(name: str, measured: Series, bar: float, note: str = "") -> Row:
    return Row(name, measured, measured.median, measured.unit, bar=bar, note=note)
