"""Attestations: what ranks that hold the same tensors record of them in a save, and how replicas compare. Pure.

Nothing is exchanged beforehand: each replica cuts the tensors into slices by itself, and seals the cut and a digest of
the bytes that it read. A save counts as staged only when all replicas cut alike, and read the same bytes where they
looked at the same. Where the images are whole without that, because each has all or a planner dealt the tensors out, it
is only reported. How much they looked at is part of the digest, so each record of a save shows whether all of it was
compared.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec

from ckptd.shared.format.rank_members import MAX_MEMBERS_NBYTES, NOBODY, check_members, count_of, ranks_in

MAX_ATTESTATIONS = 16  # sets of replicas that a rank is of
SUM_NBYTES = 8
MAX_SHARED_PARTS = 32  # of the replicated tensors of a rank, in all its sets
PART_NBYTES = 4
_Sum = Annotated[bytes, msgspec.Meta(min_length=SUM_NBYTES, max_length=SUM_NBYTES)]
_Members = Annotated[bytes, msgspec.Meta(max_length=MAX_MEMBERS_NBYTES)]

# The first byte of Attestation.content: of which bytes the others are a digest.
WHOLE = b"a"  # of all, made by hosts
ON_DEVICES = 0x80  # or above: of all, made by devices as well; the lower bits tell which tensors lie there
FIRST = b"f"  # of a cut that is new, 4 GiB in each save
WINDOW = b"l"  # of a 256th, another one in each save
NOTHING = b"n"  # of none: what could not be compared


class Attestation(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One rank's record of the tensors that it holds as some others do: any ranks of the job, named in ``members``.

    ``parts`` is there when all bytes were looked at: digests of PART_NBYTES each, of runs of tensors in their order.
    ``only_told``: the images are whole without it, so a save whose replicas differ stands, and its record says so.
    """

    members: _Members  # of the set, this rank among them; NOBODY where they are not known
    cut: _Sum  # of names, dtypes and local shapes, in their order: the replicas' cuts follow from it
    content: _Sum  # of the bytes that were looked at this time; the first byte says which those are
    parts: Annotated[bytes, msgspec.Meta(max_length=MAX_SHARED_PARTS * PART_NBYTES)] = b""
    only_told: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for members that no job has."""
        check_members(self.members)

    @property
    def of_all_bytes(self) -> bool:
        """Whether all bytes were looked at."""
        return self.content[:1] == WHOLE or self.content[0] >= ON_DEVICES


class Where(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """In which runs of the tensors of a set of replicas two of them differ."""

    members: _Members  # of the set
    parts: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0, lt=MAX_SHARED_PARTS)], ...], msgspec.Meta(max_length=MAX_SHARED_PARTS)
    ]


class Difference(NamedTuple):
    """Why the slices do not make a whole. where: None when that is not known, or the tensors themselves are others."""

    reason: str
    where: Where | None = None


class Compared(enum.StrEnum):
    """How much of what replicas hold was the same on all of them in a save."""

    NO_REPLICAS = ""  # no rank knew of replicas: there was nothing to compare
    ALL = "all"
    WINDOW = "window"  # some of the bytes, others in each save
    DIFFERING = "differing"  # what was compared differed, and the save stood all the same


_DOUBTS = {
    Compared.WINDOW: "its ranks saved what they all hold, and only some of those bytes were compared",
    Compared.DIFFERING: "its replicas differed when it was saved",
}


# Of a rank that holds what others may hold too, and cannot say how these compare.
NOT_COMPARED = Attestation(NOBODY, bytes(SUM_NBYTES), NOTHING.ljust(SUM_NBYTES), only_told=True)


def difference_of(attestations: Mapping[int, Sequence[Attestation]], *, complete: bool = True) -> Difference | None:
    """Why the slices of all ranks do not make a whole; None when they do, or need not. attestations: by rank.

    complete: False where those of some ranks may be missing: only those that are there are compared.
    """
    for members, said_by in _sets(attestations).items():
        first = min(said_by)
        alone = [rank for rank, attestation in said_by.items() if attestation.only_told]
        if len(alone) == len(said_by):
            continue
        if alone:
            other = next(rank for rank, attestation in said_by.items() if not attestation.only_told)
            return Difference(f"rank {other} saved a slice of what rank {alone[0]} saved all of")
        seen: dict[bytes, tuple[int, Attestation]] = {}  # by what was looked at: the first rank that did, what it said
        for rank, attestation in said_by.items():
            if attestation.cut != said_by[first].cut:
                return Difference(f"ranks {first} and {rank} hold different tensors where replicas should be")
            # A rank that failed a save, or learned later how one ended, may look elsewhere than the others.
            other, theirs = seen.setdefault(attestation.content[:1], (rank, attestation))
            if attestation.content != theirs.content:
                text = f"ranks {other} and {rank} are no replicas: what should be equal on both differs"
                return Difference(text, _where(theirs, attestation))
        if complete and (text := _absence(members, list(said_by))):
            return Difference(text)
    return None


def _absence(members: bytes, said_by: list[int]) -> str:
    """Why the ranks that said something of a set, which ascend, are not its members; empty when they are."""
    count = count_of(members)
    if len(said_by) < count:  # first: a few bytes may name a million ranks
        return f"of {count} replicas only {len(said_by)} saved a slice, rank {said_by[0]} among them"
    if tuple(said_by) == ranks_in(members):
        return ""
    stranger = next(rank for rank in said_by if rank not in ranks_in(members))
    return f"rank {stranger} saved a slice of what it does not hold with the others"


def difference(attestations: Mapping[int, Sequence[Attestation]]) -> str:
    """Why the slices of all ranks do not make a whole; empty when they do. attestations: by rank."""
    found = difference_of(attestations)
    return found.reason if found is not None else ""


def compared(attestations: Mapping[int, Sequence[Attestation]]) -> Compared:
    """How far the attestations of all ranks, by rank, prove that replicas hold the same."""
    sets = _sets(attestations)
    if not sets:
        return Compared.NO_REPLICAS
    if differing(attestations):
        return Compared.DIFFERING
    whole = all(_is_proved(list(said_by.values())) for said_by in sets.values())
    return Compared.ALL if whole else Compared.WINDOW


def differing(attestations: Mapping[int, Sequence[Attestation]]) -> list[tuple[int, ...]]:
    """Sets of replicas that are none, as far as was looked: the ranks of each that said something."""
    return [tuple(said_by) for said_by in _sets(attestations).values() if _differ(list(said_by.values()))]


def as_recorded(attestations: Sequence[Attestation]) -> tuple[Attestation, ...]:
    """What goes to the store of them: all but the digests of parts, which serve to name what differs."""
    return tuple(msgspec.structs.replace(attestation, parts=b"") for attestation in attestations)


def doubt(found: str) -> str:
    """The note for the user about a checkpoint with this record; empty: none."""
    return _DOUBTS.get(Compared(found), "") if found in set(Compared) else _DOUBTS[Compared.WINDOW]


def _sets(attestations: Mapping[int, Sequence[Attestation]]) -> dict[bytes, dict[int, Attestation]]:
    """By members, what each rank said of the set."""
    sets: dict[bytes, dict[int, Attestation]] = {}
    for rank, said in sorted(attestations.items()):
        for attestation in said:
            sets.setdefault(attestation.members, {})[rank] = attestation
    return sets


def _differ(said: Sequence[Attestation]) -> bool:
    seen: dict[bytes, bytes] = {}  # what was found, by what was looked at
    alike = all(
        seen.setdefault(attestation.content[:1], attestation.content) == attestation.content for attestation in said
    )
    return not alike or len({attestation.cut for attestation in said}) > 1


def _is_proved(said: Sequence[Attestation]) -> bool:
    first = said[0]
    alike = all((attestation.cut, attestation.content) == (first.cut, first.content) for attestation in said)
    return alike and first.of_all_bytes and len(said) == count_of(first.members)


def _where(one: Attestation, other: Attestation) -> Where | None:
    if len(one.parts) != len(other.parts):
        return None
    starts: Iterable[int] = range(0, len(one.parts), PART_NBYTES)
    parts = [i for i, at in enumerate(starts) if one.parts[at : at + PART_NBYTES] != other.parts[at : at + PART_NBYTES]]
    return Where(one.members, tuple(parts)) if parts else None
