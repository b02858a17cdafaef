"""Compares complete tensors that several ranks saved under one name.

A checkpoint has digests of blocks, not of tensors. If a tensor has the same offset in all images, they decide for each
block that is equal in all, or that contains only this tensor. Other parts are read, up to a limit. The result is only
used for a note, so these bytes are not checked against the digests of their blocks of 16 MiB.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from typing import NamedTuple

import xxhash

from ckptd.shared.base.errors import DamagedError
from ckptd.shared.format.digest import BLOCK_NBYTES, DIGEST_NBYTES
from ckptd_client._load.image_ranges import Images, ReadAt
from ckptd_client._state.reshard import Saved

log = logging.getLogger("ckptd_client")
MAX_NBYTES = 256 << 20  # limit of one rank's reads in one load, of all images
MAX_READS = 32_768
_READERS = 8  # images at a time
_CHUNK_NBYTES = 1 << 20
Tables = Mapping[int, bytes]  # digests of blocks, by rank
Choice = Callable[[tuple[Saved, ...]], tuple[Saved, ...]]


class Part(NamedTuple):
    """A range of bytes of a tensor."""

    start: int
    nbytes: int


@dataclass(slots=True)
class Question:
    """A tensor that several ranks saved. alike: None while it is unknown."""

    held: tuple[Saved, ...]
    parts: tuple[Part, ...] = ()  # ranges that digests do not decide
    alike: bool | None = None
    seen: dict[int, bytes] = field(default_factory=dict)  # digests of the parts, by rank, without unreadable ones

    @property
    def nbytes(self) -> int:
        """Bytes to be read of each image."""
        return sum(part.nbytes for part in self.parts)

    def conclude(self) -> None:
        """Decides by the digests so far."""
        if len({*self.seen.values()}) > 1:
            self.alike = False
        elif len(self.seen) == len(self.held):
            self.alike = True


def questions_of(names: Mapping[str, Sequence[Saved]], tables: Tables) -> dict[str, Question]:
    """For each name the result of the images' digests, or the parts to be read. Tied names have one object. Pure.

    names: the boxes that ranks saved, each a complete tensor, of one shape and dtype. tables: of all those ranks.
    """
    same = cache(partial(_same_block, tables))
    found: dict[tuple[tuple[int, int, int], ...], Question] = {}
    out = {}
    for name, held in names.items():
        key = tuple((saved.rank, saved.entry.data_offset, saved.entry.nbytes) for saved in held)
        if key not in found:
            found[key] = _question(tuple(held), same)
        out[name] = found[key]
    return out


def _same_block(tables: Tables, ranks: tuple[int, ...], index: int) -> bool:
    at = index * DIGEST_NBYTES
    digests = {tables[rank][at : at + DIGEST_NBYTES] for rank in ranks}
    return len(digests) == 1 and len(digests.pop()) == DIGEST_NBYTES


def _question(held: tuple[Saved, ...], same: Callable[[tuple[int, ...], int], bool]) -> Question:
    start, nbytes = held[0].entry.data_offset, held[0].entry.nbytes
    if any(saved.entry.data_offset != start for saved in held):
        return Question(held, (Part(0, nbytes),)) if nbytes else Question(held, alike=True)
    ranks = tuple(saved.rank for saved in held)
    parts = []
    for index in range(start // BLOCK_NBYTES, -(-(start + nbytes) // BLOCK_NBYTES)):
        if same(ranks, index):
            continue
        first, stop = max(index * BLOCK_NBYTES, start), min((index + 1) * BLOCK_NBYTES, start + nbytes)
        if stop - first == BLOCK_NBYTES:
            return Question(held, alike=False)
        parts.append(Part(first - start, stop - first))
    return Question(held, tuple(parts), None if parts else True)


def compare(questions: Iterable[Question], images: Images) -> None:
    """Reads the undecided parts, the smallest first, up to the limit. Blocks.

    The first and the last image are first, because usually they differ already. Parts that cannot be read, or exceed
    the limit, stay undecided; a damaged or missing image does not raise.
    """
    budget = _Budget()
    undecided = list({id(question): question for question in questions}.values())
    for chosen in (_ends, _middle):
        undecided = [question for question in undecided if question.alike is None]
        undecided = _read(undecided, chosen, images, budget)


def _read(questions: list[Question], chosen: Choice, images: Images, budget: "_Budget") -> list[Question]:
    """Reads the parts of these questions in the chosen images. Returns the questions within the budget."""
    wanted: dict[int, list[tuple[Question, Saved]]] = {}
    taken = []
    for question in sorted(questions, key=lambda one: one.nbytes * len(chosen(one.held))):
        held = chosen(question.held)
        if budget.take(len(held) * question.nbytes, len(held) * len(question.parts)):
            taken.append(question)
            for saved in held:
                wanted.setdefault(saved.rank, []).append((question, saved))
    if wanted:
        with ThreadPoolExecutor(min(_READERS, len(wanted)), thread_name_prefix="ckptd-alike") as pool:
            list(pool.map(partial(_digest_image, images), wanted, wanted.values()))
    for question in taken:
        question.conclude()
    return taken


def _ends(held: tuple[Saved, ...]) -> tuple[Saved, ...]:
    return held[0], held[-1]


def _middle(held: tuple[Saved, ...]) -> tuple[Saved, ...]:
    return held[1:-1]


class _Budget:
    """The remaining limit of reads."""

    def __init__(self) -> None:
        self._nbytes, self._reads = MAX_NBYTES, MAX_READS

    def take(self, nbytes: int, reads: int) -> bool:
        """Counts a read if it is within the limit; whether it is."""
        if nbytes > self._nbytes or reads > self._reads:
            return False
        self._nbytes -= nbytes
        self._reads -= reads
        return True


def _digest_image(images: Images, rank: int, wanted: list[tuple[Question, Saved]]) -> None:
    """Digests the parts of these questions in one image."""
    wanted.sort(key=lambda one: one[1].entry.data_offset)
    try:
        with images.reading(rank) as read:
            for question, saved in wanted:
                question.seen[rank] = _digest(question.parts, saved.entry.data_offset, read)
    except (OSError, DamagedError) as error:
        log.debug("the image of rank %d is not compared: %s", rank, error)


def _digest(parts: Iterable[Part], start: int, read: ReadAt) -> bytes:
    found = xxhash.xxh3_128()
    for part in parts:
        for at in range(part.start, part.start + part.nbytes, _CHUNK_NBYTES):
            found.update(read(start + at, min(_CHUNK_NBYTES, part.start + part.nbytes - at)))
    return found.digest()
