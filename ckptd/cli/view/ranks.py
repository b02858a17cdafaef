"""The ranks of this node as people read them: one row for all of equal state, a bar for each in a drain."""

from collections.abc import Iterator

from rich.text import Text

from ckptd.cli.view.parts import Marks, bar
from ckptd.shared.protocol.status import RankStatus
from ckptd.system import human

_MAX_SLOT_MARKS = 16
_MAX_RANK_BARS = 8


def rank_rows(ranks: list[RankStatus], marks: Marks, bar_columns: int) -> Iterator[Text]:
    """One row for all ranks of equal state: 8 ranks in step are one row, and a missing rank has its own."""
    alike: dict[tuple[object, ...], list[RankStatus]] = {}
    for rank in ranks:
        where = None if _is_here(rank) else (rank.pid, rank.host)
        alike.setdefault((rank.slots_in_use, rank.slots, rank.slot_nbytes, rank.newest_step, where), []).append(rank)
    labels = [human.ranges(rank.rank for rank in group) for group in alike.values()]
    width = max(
        (len(label) for label, group in zip(labels, alike.values(), strict=True) if _is_here(group[0])), default=0
    )
    for label, group in zip(labels, alike.values(), strict=True):
        rank = group[0]
        if _is_here(rank):
            yield Text.assemble((f"{label.ljust(width)}  ", "bold"), _slot_use(rank, marks))
        else:
            yield Text.assemble(_elsewhere(label, group), _slot_use(rank, marks))
    yield from _rank_bars([rank for rank in ranks if rank.drain_nbytes], marks, bar_columns)


def late_rows(ranks: list[RankStatus]) -> Iterator[Text]:
    """What verifies copies that run while training continues, one row for all ranks with the same."""
    alike: dict[str, list[int]] = {}
    for rank in ranks:
        if rank.alive and rank.late:
            alike.setdefault(rank.late, []).append(rank.rank)
    for late, numbers in alike.items():
        why_not = late.startswith("off:")
        what = f"copied before save returns ({late})" if why_not else f"verified by {late}" if late != "off" else late
        whose = f"{human.ranges(numbers)}  " if len(alike) > 1 else ""
        yield Text.assemble((whose, "bold"), (human.printable(what), "yellow" if why_not else ""))


def _is_here(rank: RankStatus) -> bool:
    return rank.alive and rank.attached


def _elsewhere(label: str, group: list[RankStatus]) -> Text:
    """What is known of ranks that run no more, or have not called this daemon, up to the slots that they have."""
    rank = group[0]
    what = "process ended" if len(group) == 1 else "processes ended"
    if rank.alive:
        what = f"{'has' if len(group) == 1 else 'have'} not called ckptd since this daemon started"
    who = f" (pid {rank.pid} on {human.printable(rank.host)})" if rank.pid else ""
    newest = f"; newest step {rank.newest_step}" if rank.newest_step is not None else ""
    noun = "rank" if len(group) == 1 else "ranks"
    return Text.assemble((f"{noun} {label}: ", "bold"), (f"{what}{newest}{who}", "yellow"), "; ")


def _rank_bars(ranks: list[RankStatus], marks: Marks, bar_columns: int) -> Iterator[Text]:
    """How far each rank of this node is in the drain; of many, those that are behind."""
    behind = sorted(ranks, key=lambda rank: (int(10 * rank.drain_nbytes_done / rank.drain_nbytes), rank.rank))
    shown = ranks if len(ranks) <= _MAX_RANK_BARS else behind[:_MAX_RANK_BARS]
    width = max((len(str(rank.rank)) for rank in shown), default=0)
    for rank in shown:
        done, total = rank.drain_nbytes_done, rank.drain_nbytes
        drawn = bar(done, total, bar_columns, "cyan", marks)
        text = f"  {human.percent(done, total):>5} of {human.size(total)}"
        yield Text.assemble((f"{rank.rank:>{width}}  ", "bold"), drawn, text)
    if len(shown) < len(ranks):
        done = sum(rank.drain_nbytes_done for rank in behind[len(shown) :])
        total = sum(rank.drain_nbytes for rank in behind[len(shown) :])
        others = human.counted(len(ranks) - len(shown), "more rank")
        yield Text(f"{others}, {human.percent(done, total)} of {human.size(total)}", "dim")


def _slot_use(rank: RankStatus, marks: Marks) -> Text:
    text = Text()
    if _is_here(rank) and rank.slots <= _MAX_SLOT_MARKS:
        text.append(marks.used * rank.slots_in_use, "cyan")
        text.append(marks.free * (rank.slots - rank.slots_in_use) + "  ", "dim")
    text.append(f"{rank.slots_in_use} of {rank.slots} slots of {human.size(rank.slot_nbytes)} in use")
    if _is_here(rank) and rank.newest_step is not None:
        text.append(f", newest step {rank.newest_step}")
    return text
