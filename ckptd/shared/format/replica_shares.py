"""What ranks that hold the same tensors say of them in a save: that shares make a whole, or how replicas compare. Pure.

Nothing is exchanged beforehand: each replica cuts the tensors by itself, and seals how it did and a digest of what it
sees in them. A save counts as staged only when all replicas cut alike, and saw the same where they looked at the same.
Where the images are whole without that, because each has all or a planner dealt the tensors out, it is only reported.
How much they looked at is part of the digest, so each record of a save tells whether all of it was compared.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec

from ckptd.shared.base.ids import MAX_RANKS

MAX_SHARES = 16  # sets of replicas that a rank is of
SUM_NBYTES = 8
MAX_SHARED_PARTS = 32  # of the tensors that a rank shares, in all its sets
PART_NBYTES = 4
_Sum = Annotated[bytes, msgspec.Meta(min_length=SUM_NBYTES, max_length=SUM_NBYTES)]

# The first byte of Share.content: of which bytes the others are a digest.
WHOLE = b"a"  # of all, made by hosts
ON_DEVICES = 0x80  # or above: of all, made by devices as well; the lower bits tell which tensors lie there
FIRST = b"f"  # of a cut that is new, 4 GiB in each save
WINDOW = b"l"  # of a 256th, another one in each save
NOTHING = b"n"  # of none: what could not be compared


class Share(msgspec.Struct, frozen=True, array_like=True):
    """One rank's word of the tensors that it shares with some others.

    ``parts`` is there when all bytes were looked at: digests of PART_NBYTES each, of runs of tensors in their order.
    ``only_told``: the images are whole without it, so a save whose replicas differ stands, and its record says so.
    """

    replicas: _Sum  # of the ranks' numbers
    count: Annotated[int, msgspec.Meta(ge=2, le=MAX_RANKS)]  # of the ranks
    cut: _Sum  # of names, dtypes and local shapes, in their order: the replicas' cuts follow from it
    content: _Sum  # of the bytes that were looked at this time; the first byte says which those are
    parts: Annotated[bytes, msgspec.Meta(max_length=MAX_SHARED_PARTS * PART_NBYTES)] = b""
    only_told: bool = False

    @property
    def of_all_bytes(self) -> bool:
        """Whether all bytes were looked at."""
        return self.content[:1] == WHOLE or self.content[0] >= ON_DEVICES


class Where(msgspec.Struct, frozen=True, array_like=True):
    """In which runs of the tensors of a set of replicas two of them differ."""

    replicas: _Sum
    parts: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0, lt=MAX_SHARED_PARTS)], ...], msgspec.Meta(max_length=MAX_SHARED_PARTS)
    ]


class Difference(NamedTuple):
    """Why shares are no whole. where: None when that is not known, or the tensors themselves are others."""

    reason: str
    where: Where | None = None


class Compared(enum.StrEnum):
    """How much of what replicas hold was the same on all of them in a save."""

    UNSHARED = ""  # no rank knew of replicas: there was nothing to compare
    ALL = "all"
    WINDOW = "window"  # some of the bytes, others in each save
    APART = "apart"  # what was compared differed, and the save stood all the same


_DOUBTS = {
    Compared.WINDOW: "its ranks saved what they all hold, and only some of those bytes were compared",
    Compared.APART: "its replicas differed when it was saved",
}


def not_compared(world_size: int) -> Share:
    """The word of a rank that holds what others may hold too, and cannot say how these compare."""
    return Share(bytes(SUM_NBYTES), max(2, world_size), bytes(SUM_NBYTES), NOTHING.ljust(SUM_NBYTES), only_told=True)


def difference_of(shares: Mapping[int, Sequence[Share]], *, complete: bool = True) -> Difference | None:
    """Why the shares of all ranks, by rank, are no whole; None when they are, or need not be.

    complete: False where the words of some ranks may be missing, and only those that are there are held together.
    """
    for said_by in _sets(shares).values():
        first = min(said_by)
        alone = [rank for rank, share in said_by.items() if share.only_told]
        if len(alone) == len(said_by):
            continue
        if alone:
            other = next(rank for rank, share in said_by.items() if not share.only_told)
            return Difference(f"rank {other} saved a share of what rank {alone[0]} saved all of")
        seen: dict[bytes, tuple[int, Share]] = {}  # by what was looked at: the first rank that did, what it said
        for rank, share in said_by.items():
            if share.cut != said_by[first].cut:
                return Difference(f"ranks {first} and {rank} hold different tensors where replicas should be")
            # A rank that failed a save, or heard later how one ended, may look elsewhere than the others.
            other, theirs = seen.setdefault(share.content[:1], (rank, share))
            if share.content != theirs.content:
                text = f"ranks {other} and {rank} are no replicas: what should be equal on both differs"
                return Difference(text, _where(theirs, share))
        if complete and len(said_by) != said_by[first].count:
            text = f"of {said_by[first].count} replicas only {len(said_by)} saved a share, rank {first} among them"
            return Difference(text)
    return None


def difference(shares: Mapping[int, Sequence[Share]]) -> str:
    """Why the shares of all ranks, by rank, are no whole; empty when they are."""
    found = difference_of(shares)
    return found.reason if found is not None else ""


def compared(shares: Mapping[int, Sequence[Share]]) -> Compared:
    """How far the shares of all ranks, by rank, prove that replicas hold the same."""
    sets = _sets(shares)
    if not sets:
        return Compared.UNSHARED
    if differing(shares):
        return Compared.APART
    whole = all(_is_proved(list(said_by.values())) for said_by in sets.values())
    return Compared.ALL if whole else Compared.WINDOW


def differing(shares: Mapping[int, Sequence[Share]]) -> list[tuple[int, ...]]:
    """Sets of replicas that are none, as far as was looked: the ranks of each that said something."""
    return [tuple(said_by) for said_by in _sets(shares).values() if _differ(list(said_by.values()))]


def as_recorded(shares: Sequence[Share]) -> tuple[Share, ...]:
    """What goes to the store of them: all but the digests of parts, which serve to name what differs."""
    return tuple(msgspec.structs.replace(share, parts=b"") for share in shares)


def doubt(found: str) -> str:
    """The note for the user about a checkpoint with this record; empty: none."""
    return _DOUBTS.get(Compared(found), "") if found in set(Compared) else _DOUBTS[Compared.WINDOW]


def _sets(shares: Mapping[int, Sequence[Share]]) -> dict[tuple[bytes, int], dict[int, Share]]:
    sets: dict[tuple[bytes, int], dict[int, Share]] = {}
    for rank, said in sorted(shares.items()):
        for share in said:
            sets.setdefault((share.replicas, share.count), {})[rank] = share
    return sets


def _differ(said: Sequence[Share]) -> bool:
    seen: dict[bytes, bytes] = {}  # what was found, by what was looked at
    alike = all(seen.setdefault(share.content[:1], share.content) == share.content for share in said)
    return not alike or len({share.cut for share in said}) > 1


def _is_proved(said: Sequence[Share]) -> bool:
    first = said[0]
    alike = all((share.cut, share.content) == (first.cut, first.content) for share in said)
    return alike and first.of_all_bytes and len(said) == first.count


def _where(one: Share, other: Share) -> Where | None:
    if len(one.parts) != len(other.parts):
        return None
    starts: Iterable[int] = range(0, len(one.parts), PART_NBYTES)
    parts = [i for i, at in enumerate(starts) if one.parts[at : at + PART_NBYTES] != other.parts[at : at + PART_NBYTES]]
    return Where(one.replicas, tuple(parts)) if parts else None
