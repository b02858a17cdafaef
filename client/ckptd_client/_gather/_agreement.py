"""Whether all ranks are about to gather the same: each says a word, and all come to the same verdict.

What is wrong on one rank is told like everything else, so that all ranks raise instead of waiting for it.
"""

import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ckptd.shared.base.errors import CkptdError, UsageError
from ckptd.shared.format.boxes import tile
from ckptd.shared.format.digest import digest
from ckptd_client._gather._cuts import Box, Shape
from ckptd_client._gather._leaves import Leaf

Exchange = Callable[[bytes], list[bytes]]
Members = tuple[int, ...]
_HINT = "call gather on all ranks with states of the same structure and the same arguments"
_MAX_TEXT = 1000


class SetWord(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says of the tensors that it holds with the same other ranks."""

    members: bytes  # a digest of them
    count: int
    lines: bytes  # digest of names, shapes, dtypes, placements
    ties: bytes  # digest of which of them are one tensor
    told: list[tuple[Shape, list[Box]]]  # of those whose boxes do not follow from what all know, in order


class Word(msgspec.Struct, frozen=True, array_like=True):
    """What one rank says of a gather."""

    settings: str = ""
    sets: list[SetWord] = []
    orphans: list[str] = []  # names of tensors here of which no holder gets anything
    groups: list[tuple[int, ...]] = []  # sets that need a process group, of which this rank is the first member
    error: str = ""
    hint: str = ""


class Agreed(NamedTuple):
    """What all ranks said, the same on all of them."""

    orphans: list[str]
    groups: list[Members]


class Listed(msgspec.Struct, frozen=True, array_like=True):
    """A set as one rank has it: what is different elsewhere is to be found."""

    members: tuple[int, ...]
    lines: dict[str, str]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Word)
_names = msgspec.msgpack.Decoder(list[str])
_listed = msgspec.msgpack.Decoder(Listed)


def failed_word(error: Exception) -> bytes:
    """In place of a word, for what went wrong here."""
    text = error.message if isinstance(error, CkptdError) else f"{type(error).__name__}: {error}"
    hint = error.hint if isinstance(error, CkptdError) else ""
    return _encoder.encode(Word(error=text[:_MAX_TEXT], hint=hint[:_MAX_TEXT]))


def agree(sets: Mapping[Members, list[Leaf]], word: Word, exchange: Exchange, rank: int) -> Agreed:
    """Collective. Makes of each set one list that all members have alike, and gives every leaf its boxes.

    A tied leaf is taken out of the list, and told which it is tied to, if all members say so. word: what else this rank
    says. Raises UsageError, on all ranks, with the first difference.
    """
    ties = {members: _ties(leaves) for members, leaves in sets.items()}
    said = [_set_word(members, leaves, ties[members]) for members, leaves in sets.items()]
    own = msgspec.structs.replace(word, sets=said)
    words = [_decoder.decode(word) for word in exchange(_encoder.encode(own))]
    _check_calls(words)
    found: dict[bytes, dict[int, SetWord]] = defaultdict(dict)
    for other, heard in enumerate(words):
        for one in heard.sets:
            found[one.members][other] = one
    for key, by_rank in found.items():
        count = next(iter(by_rank.values())).count
        if len(by_rank) != count or len({one.lines for one in by_rank.values()}) != 1:
            _raise_difference(sets, key, min(by_rank), exchange, rank)
    for by_rank in found.values():
        _check_told(by_rank)
    for members, leaves in sets.items():
        _settle(leaves, found[_key(members)], ties[members])
    orphans = sorted({name for word in words for name in word.orphans})
    return Agreed(orphans, sorted(group for word in words for group in word.groups))


def check_reached(orphans: Sequence[str], names: Collection[str], exchange: Exchange) -> None:
    """Collective. Whether some rank that gets tensors has, by name, each of those whose holders get nothing.

    So it is with what tensor parallelism leaves whole: every column of the mesh holds it. names: of this rank's
    tensors, if it gets some. Raises UsageError on all ranks.
    """
    missing = set(orphans)
    for word in exchange(_encoder.encode([name for name in orphans if name not in names])):
        missing &= set(_names.decode(word))
    if missing:
        text = f"{min(missing)!r} lies on no rank that it is gathered to, nor do {len(missing) - 1} others"
        raise UsageError(text, hint="name a rank that holds it in to, too")


def _key(members: Members) -> bytes:
    return digest(repr(members).encode())


def _set_word(members: Members, leaves: Sequence[Leaf], ties: Mapping[int, Leaf]) -> SetWord:
    lines = "\n".join([f"{leaf.name}: {leaf.line}" for leaf in leaves])
    tied = "\n".join(f"{i} {leaf.name}" for i, leaf in ties.items())
    told = [(leaf.box_shape, list(leaf.own)) for leaf in leaves if leaf.place.boxes is None]
    return SetWord(_key(members), len(members), digest(lines.encode()), digest(tied.encode()), told)


def _ties(leaves: Sequence[Leaf]) -> dict[int, Leaf]:
    """By place in the list: leaves that are an earlier one under another name."""
    first: dict[object, Leaf] = {}
    pairs = ((i, first.setdefault((leaf.identity, leaf.line), leaf)) for i, leaf in enumerate(leaves) if leaf.identity)
    return {i: owner for i, owner in pairs if owner is not leaves[i]}


def _check_calls(words: Sequence[Word]) -> None:
    for other, word in enumerate(words):
        if word.error:
            raise UsageError(f"rank {other} cannot gather: {word.error}", hint=word.hint)
    for other, word in enumerate(words):
        if word.settings != words[0].settings:
            text = f"rank {other} gathers with {word.settings}, rank 0 with {words[0].settings}"
            raise UsageError(text, hint=_HINT)


def _check_told(said: Mapping[int, SetWord]) -> None:
    """Whether boxes that ranks told each other make up their tensors."""
    for number, (shape, _) in enumerate(next(iter(said.values())).told):
        boxes = [box for one in said.values() for box in one.told[number][1]]
        if not tile(shape, boxes):
            text = f"the parts that ranks {sorted(said)} have of a tensor of {list(shape)} do not make it up"
            raise UsageError(text, hint="give each element of the tensor to one rank")


def _settle(leaves: list[Leaf], said: Mapping[int, SetWord], ties: Mapping[int, Leaf]) -> None:
    order = sorted(said)
    told = 0
    for leaf in leaves:
        if leaf.place.boxes is None:
            boxes = tuple(tuple(said[other].told[told][1]) for other in order)
            leaf.place = leaf.place._replace(boxes=boxes)
            told += 1
    if len({one.ties for one in said.values()}) == 1:
        for i, owner in ties.items():
            leaves[i].tied = owner
        leaves[:] = [leaf for leaf in leaves if leaf.tied is None]


# --- the way of an error ---


def _raise_difference(
    sets: Mapping[Members, Sequence[Leaf]], key: bytes, teller: int, exchange: Exchange, rank: int
) -> None:
    """Collective: one rank lists a set as it has it, the others look for the first difference. Raises on all."""
    own = {leaf.name: leaf.line for members, leaves in sets.items() if _key(members) == key for leaf in leaves}
    every = {leaf.name: leaf.line for leaves in sets.values() for leaf in leaves}
    members = next((members for members in sets if _key(members) == key), ())
    listed = Listed(members, own)
    told = exchange(zlib.compress(_encoder.encode(listed)) if rank == teller else b"")[teller]
    listed = _listed.decode(zlib.decompress(told))
    concerned = rank in listed.members and rank != teller
    text = _difference(every, own, listed.lines, rank, teller) if concerned else ""
    texts = exchange(text.encode())
    found = next((text.decode() for text in texts if text), "the order of their tensors")
    raise UsageError(f"the ranks gather different states: {found}", hint=_HINT)


def _difference(
    every: Mapping[str, str], own: Mapping[str, str], listed: Mapping[str, str], rank: int, teller: int
) -> str:
    """The first tensor that this rank does not have as the teller has it."""
    nothing = "not there, or not sharded"
    for name, line in listed.items():
        mine = every.get(name, nothing)
        if mine != line:
            return f"{name!r} is {mine} on rank {rank}, and {line} on rank {teller}"[:_MAX_TEXT]
    for name in own:
        if name not in listed:
            return f"{name!r} is {own[name]} on rank {rank}, and {nothing} on rank {teller}"[:_MAX_TEXT]
    return ""
