"""Ranks of another world: each loads its share of what all ranks saved, by ranges, and compares it to the bit."""

import re
from pathlib import Path
from typing import NamedTuple

from bench.large.rank import Loaded, Rank
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.byte_ranges import packed
from ckptd.shared.protocol import messages as m
from ckptd.shared.protocol.segments import Wanted

_PULLED = re.compile(r"\bpulled save=.* nbytes=(\d+)")


class Part(NamedTuple):
    """Of the image of a rank that saved: where it begins there, and what these bytes are."""

    rank: int
    start: int
    content: bytes


class ResizedRank(Rank):
    """A rank that reads what it saved, or, in a job of another size, its share of what all ranks saved."""

    def goes_on(self) -> bool:
        """Whether its load is not over. Asks for its share, reads it, and raises RuntimeError for another bit."""
        told = self.told.get(m.LoadFrom)
        if isinstance(told, m.LoadFrom) and told.saved_by and told.save is not None:
            del self.told[m.LoadFrom]
            self._order, self._parts = told, self._share(told.save, told.saved_by)
            wanted = [Wanted(part.rank, packed([(part.start, part.start + len(part.content))])) for part in self._parts]
            self._send(m.AskSegments(seq=self._next(), save=told.save, wanted=wanted))
            return True
        here = self.told.pop(m.SegmentsHere, None)
        if isinstance(here, m.SegmentsHere):
            self._take(here)
            return True
        return super().goes_on()

    def _share(self, save: SaveId, saved_by: int) -> list[Part]:
        """This rank's part of the tensors of all ranks, end to end."""
        nbytes = self._saving.nbytes // 4 * 4
        first, last = (saved_by * nbytes * at // self._world_size for at in (self.rank, self.rank + 1))
        parts = []
        for rank in range(first // nbytes, -(-last // nbytes)):
            made, _ = self._made_by(rank, save, saved_by)
            start, stop = max(first - rank * nbytes, 0), min(last - rank * nbytes, nbytes)
            (tensor,) = made.layout.tensors
            image = made.image[tensor.data_offset + start : tensor.data_offset + stop]
            parts.append(Part(rank, tensor.data_offset + start, image))
        return parts

    def _take(self, here: m.SegmentsHere) -> None:
        order, names = self._order, {one.rank: one.name for one in here.files}
        if here.lacks or here.refused:
            raise RuntimeError(f"rank {self.rank}: {here.refused or here.lacks}")
        assert order.save is not None  # noqa: S101 - it asked for some of it
        for part in self._parts:
            with open(Path(self._directory) / names[part.rank], "rb") as file:
                file.seek(part.start)
                if file.read(len(part.content)) != part.content:
                    raise RuntimeError(f"rank {self.rank} has other bytes of rank {part.rank} than that one saved")
        self.loaded = Loaded(order.save, order.tier, b"".join(part.content for part in self._parts))
        self._send(m.DropSegments(seq=self._next(), save=order.save))
        self._send(m.ReportLoad(seq=self._next(), save=order.save, tier=order.tier))

    @property
    def needed(self) -> int:
        """Bytes of its share that another rank's node had."""
        return sum(len(part.content) for part in self._parts if part.rank != self.rank)


def moved(logs: list[Path]) -> int:
    """Bytes that daemons have pulled, by their logs."""
    return sum(int(found) for log in logs for found in _PULLED.findall(log.read_text(errors="replace")))
