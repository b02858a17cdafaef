"""A ZeRO checkpoint opened: named tensors, made of the ranks' flat ranges, and the settings of its optimizer.

Names are those that torch.distributed.checkpoint has for {"model": .., "optimizer": ..} of `get_state_dict`, so that
what is exported fits a model and an optimizer that never knew DeepSpeed.
"""

import os
import struct
from collections.abc import Container, Iterator
from typing import Any, NamedTuple

from ckptd import pickling
from ckptd.export.archive import Archive as NewArchive
from ckptd.export.deepspeed import directory
from ckptd.export.deepspeed.archives import Archive, Range
from ckptd.export.deepspeed.model import Model
from ckptd.export.deepspeed.partitions import MAX_STAGE, WEIGHTS, Partition, partition_of, ranges, ranks_of, stage_of
from ckptd.export.deepspeed.ranges import whole
from ckptd.export.plan import Box, Tensor
from ckptd.export.read import SourceFile
from ckptd.protocol.errors import DamagedError
from ckptd.protocol.layout import Path

_COUNT = struct.Struct("<f")


class _Part(NamedTuple):
    """What a tensor of the output is of a parameter or buffer: its WEIGHTS, or a state of the optimizer."""

    path: Path
    of: str
    state: str


class ZeroCheckpoint:
    """The files of a directory, opened: what they say was read, no tensor yet.

    Raises UsageError for a kind that is not exported; DamagedError or OSError, naming the file, for one that is
    missing, cut off or of another save.
    """

    incarnation = None
    flat = True

    def __init__(self, path: str) -> None:
        self.path = path
        self._archives: list[Archive] = []
        found = directory.files_of(path)
        first = self._open(found.optimizer[0])
        cut, ranks = stage_of(first) == MAX_STAGE, ranks_of(first)
        directory.check_ranks(found, ranks)
        names = directory.model_files(found, ranks if cut else 1)
        self._model = Model([self._open(name) for name in names], cut=cut)
        opened = [first, *(self._open(name) for name in found.optimizer[1:])]
        self._partitions = [partition_of(one, self._model.shapes, ranks) for one in opened]
        _check_one_save(self._partitions)
        self._counts: dict[float, int] = {}  # of steps that no file has as a tensor, and which number each is here
        self._parts = {_name(part.path): part for part in (*self._weights(), *self._states())}
        self._settings = {_name(path): (path, value) for path, value in self._param_groups()}
        self.paths: dict[str, Path] = {name: part.path for name, part in self._parts.items()}
        self.paths |= {name: path for name, (path, _) in self._settings.items()}

    @property
    def step(self) -> int:
        """Steps of the optimizer, as the engine counted them."""
        return self._model.step

    @property
    def save_id(self) -> str:
        """The tag."""
        return os.path.basename(self.path)

    @property
    def leaves(self) -> int:
        """How many values are no tensors: settings of the optimizer."""
        return len(self._settings)

    @property
    def names(self) -> list[str]:
        """Of the tensors: the model's in its order, then the optimizer's."""
        return list(self._parts)

    @property
    def files(self) -> list[SourceFile]:
        """What the boxes lie in: the archives, which have CRCs at best, and at last the values made here."""
        made = b"".join(map(_COUNT.pack, self._counts))
        return [*(one.source() for one in self._archives), SourceFile("counts of steps", len(made), None, content=made)]

    def stock_leaves(self) -> dict[str, bytes]:
        """The optimizer's settings, a torch.save archive each."""
        return {name: _saved(value) for name, (_, value) in self._settings.items()}

    def tensors(self, names: Container[str]) -> dict[str, Tensor]:
        """Those of these names. Tied names have the same one. Raises DamagedError for one that is not whole."""
        made: dict[tuple[str, str], Tensor] = {}
        found: dict[str, Tensor] = {}
        for name, part in self._parts.items():
            if name in names:
                key = self._model.holder(part.of), part.state
                found[name] = made[key] = made.get(key) or self._tensor(name, *key)
        return found

    def _open(self, path: str) -> Archive:
        self._archives.append(Archive(path, len(self._archives)))
        return self._archives[-1]

    def _tensor(self, name: str, of: str, state: str) -> Tensor:
        if of not in self._model.trained:
            return whole(name, *self._model.uncut(of), where=self.path)
        single = self._single(of).get(state)
        if single is None:
            return whole(name, self._model.trained[of], ranges(self._partitions, of, state), where=self.path)
        if isinstance(single, float):
            number = self._counts.setdefault(single, len(self._counts))
            single = Range(len(self._archives), number * _COUNT.size, 1, "F32")
        return Tensor(name, single.dtype, (), (Box(single.file, single.start, (), ()),))

    # -- what there is --

    def _weights(self) -> Iterator[_Part]:
        for name in self._model.names:
            yield _Part((("k", "model"), ("k", name)), name, WEIGHTS)

    def _states(self) -> Iterator[_Part]:
        for name in self._model.trained:
            for state in (*self._flat(name), *self._single(name)):
                if state != WEIGHTS:
                    yield _Part((("k", "optimizer"), ("k", "state"), ("k", name), ("k", state)), name, state)

    def _flat(self, name: str) -> dict[str, Range]:
        """By state, the flat tensors of the first rank that has something of a parameter."""
        return next((p.flat[p.shares[name][0].group] for p in self._partitions if name in p.shares), {})

    def _single(self, name: str) -> dict[str, Range | float]:
        return next((p.single[p.shares[name][0].group] for p in self._partitions if name in p.shares), {})

    def _param_groups(self) -> Iterator[tuple[Path, Any]]:
        for number, (settings, groups) in enumerate(self._partitions[0].param_groups):
            names = [name for group in groups for name in self._model.shapes[group]]
            for key, value in {**settings, "params": names}.items():
                yield (("k", "optimizer"), ("k", "param_groups"), ("l", number), ("k", key)), value


def _check_one_save(partitions: list[Partition]) -> None:
    """Raises DamagedError when the ranks' optimizers made different numbers of steps."""
    counts = {_count(partition): partition.archive.path for partition in partitions}
    if len(counts) > 1:
        one, other, *_ = counts.values()
        raise DamagedError(
            f"{one} and {other} are of different saves: their optimizers made different numbers of steps",
            hint="take another tag, or copy the files again from where they were written",
        )


def _count(partition: Partition) -> bytes | float | None:
    """The first count of steps, as it lies in the file."""
    count = next((single["step"] for single in partition.single if "step" in single), None)
    return partition.archive.read(count) if isinstance(count, Range) else count


def _name(path: Path) -> str:
    return ".".join(str(key) for _, key in path)


def _saved(value: Any) -> bytes:
    """What torch.save makes of a plain value."""
    zipped = NewArchive()
    zipped.add("data.pkl", pickling.dumps(value))
    zipped.add("byteorder", b"little")
    zipped.add("version", b"3\n")
    zipped.close()
    return b"".join(data for _, data in zipped.blobs)
