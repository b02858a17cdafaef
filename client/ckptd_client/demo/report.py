"""The results and measurements of the demo, from the ranks' own records. Pure."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich.table import Table

from ckptd_client.demo import DemoError
from ckptd_client.demo.journal import Finished, Loss, Reached, Record, Restored, Saved, TorchSaved
from ckptd_client.demo.promises import Records

_ROWS = 7

R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class Curve:
    """The loss curve of the interrupted training, already found equal to the reference."""

    points: list[tuple[int, str, str]]  # step, loss, name of the attempt that ran it last
    compared: int  # losses, over ranks and attempts
    repeated: int  # steps that were run again after a restore
    digest: str  # of the weights at the end


def join(reference: Records, attempts: Sequence[tuple[str, Records]], steps: int) -> Curve:
    """The attempts' one loss curve. Raises DemoError, naming the place, at the first loss unlike the reference's."""
    compared = 0
    joined: dict[int, tuple[str, str]] = {}
    run = 0
    for rank, expected in enumerate(map(losses, reference)):
        if list(expected) != list(range(steps)):
            raise DemoError(f"the uninterrupted run has losses for {len(expected)} of {steps} steps on rank {rank}")
        joined.clear()
        run = 0
        for name, records in attempts:
            for step, loss in losses(records[rank]).items():
                if loss != expected[step]:
                    raise DemoError(f"{name}, rank {rank}, step {step}: loss {loss} is not {expected[step]}")
                joined[step] = (loss, name)
                run += 1
        compared += run
        if sorted(joined) != list(range(steps)):
            raise DemoError(f"the attempts together have losses for {len(joined)} of {steps} steps on rank {rank}")
    points = [(step, *joined[step]) for step in sorted(joined)]
    return Curve(points, compared, run - steps, _one_digest([*reference, *attempts[-1][1]]))


def losses(records: Iterable[Record]) -> dict[int, str]:
    """Exact loss by step."""
    return {record.step: record.loss for record in records if isinstance(record, Loss)}


def _one_digest(ranks: Records) -> str:
    digests = {record.digest for records in ranks for record in records if isinstance(record, Finished)}
    if len(digests) != 1:
        raise DemoError(f"the weights at the end differ: digests {', '.join(sorted(digests)) or 'missing'}")
    return digests.pop()


def curve_table(reference: Records, curve: Curve) -> Table:
    """A few steps of both curves."""
    table = _table("step", "uninterrupted run", "killed and resumed", "run in")
    expected = losses(reference[0])
    every = max(1, (len(curve.points) - 1) // (_ROWS - 1))
    for step, loss, name in [*curve.points[:-1:every], curve.points[-1]]:
        exact = loss != expected[step]
        table.add_row(str(step), _shown(expected[step], exact=exact), _shown(loss, exact=exact), name)
    return table


def _shown(loss: str, *, exact: bool) -> str:
    """Digits that people read; the hexadecimal form too where only that would show a difference."""
    return f"{float.fromhex(loss):.6f}" + (f"  {loss}" if exact else "")


@dataclass(frozen=True)
class Measured:
    """The records for the last table."""

    reference: Records
    slowed: list[Records]  # attempts under the daemon whose drain was capped
    free: list[Records]
    restores: list[tuple[str, list[Restored]]]  # what was killed, and what came back, by rank

    def table(self, cap: str) -> Table:
        """Stall, time to each milestone and restores, beside torch.save. cap: the drain's cap in words."""
        torch_saves = _of(TorchSaved, [self.reference])
        stalls = [saved.stall_s for saved in _of(Saved, [*self.slowed, *self.free])]
        ours = [restored.nbytes for _, ranks in self.restores for restored in ranks]
        theirs = [s.nbytes for s in torch_saves]
        table = _table(
            "",
            f"ckptd, {_mib(ours)} per rank",
            f"torch.save, {_mib(theirs)} on rank 0",
        )
        table.add_row("training stops, median", ms(stalls), ms([s.seconds for s in torch_saves]))
        table.add_row("training stops, worst", ms(stalls, max), ms([s.seconds for s in torch_saves], max))
        staged, protected = (_reached(name, [*self.slowed, *self.free]) for name in ("staged", "protected"))
        table.add_row("safe from dying ranks: staged", ms(staged), "")
        table.add_row("safe from a lost node: protected", ms(protected), "")
        on_disk = f"{ms(_reached('durable', self.free))}, meanwhile training goes on"
        table.add_row(
            "on disk and synced: durable", on_disk, f"{ms([s.synced_s for s in torch_saves])}, training stopped"
        )
        slowed = _reached("durable", self.slowed)
        if slowed:
            table.add_row(f"  drain held to {cap}", ms(slowed), "")
        for what, restored in self.restores:
            for number, (tier, ranks, slowest) in enumerate(routes(restored)):
                where = f"step {restored[0].step} from {tier}, {ranks} ranks"
                table.add_row("" if number else f"restore after {what}", f"{slowest}: {where}", "")
        return table

    def notes(self) -> list[str]:
        """Notes for the table: the save with the worst stop, which is an exception."""
        starts = [_of(Saved, [ranks]) for ranks in [*self.slowed, *self.free]]
        saves = [(saved.stall_s, saved.step, saved.step == start[0].step) for start in starts for saved in start]
        if not saves:
            return []
        _, step, first = max(saves)
        which = "the first after a start" if first else "not the first after a start"
        return [f"worst stop of ckptd: the save of step {step}, {which}; all ranks share this machine's cores"]


def routes(restored: Sequence[Restored]) -> list[tuple[str, int, str]]:
    """For each route: its tier, how many ranks took it, and how long the slowest of them."""
    taken: dict[str, list[float]] = {}
    for one in restored:
        taken.setdefault(one.tier, []).append(one.seconds)
    return [(tier, len(seconds), ms(seconds, max)) for tier, seconds in taken.items()]


def _mib(nbytes: Sequence[int]) -> str:
    return f"{max(nbytes) / 2**20:.0f} MiB" if nbytes else "nothing"


def ms(seconds: Sequence[float], choose: Callable[[Sequence[float]], float] = statistics.median) -> str:
    """Median, or another choice, of some durations, in milliseconds."""
    if not seconds:
        return "none was seen"
    return f"{1000 * choose(seconds):.1f} ms"


def _reached(milestone: str, attempts: Sequence[Records]) -> list[float]:
    return [record.seconds for record in _of(Reached, attempts) if record.milestone == milestone]


def _of(kind: type[R], attempts: Sequence[Records]) -> list[R]:
    return [record for ranks in attempts for records in ranks for record in records if isinstance(record, kind)]


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column)
    return table
