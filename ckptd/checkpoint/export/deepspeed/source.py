"""A ZeRO checkpoint opened: named tensors, made of the ranks' flat ranges, and the settings of its optimizer.

Names are those that torch.distributed.checkpoint has for {"model": .., "optimizer": ..} of `get_state_dict`, so that
what is exported fits a model and an optimizer that never knew DeepSpeed.
"""

import math
import os
import struct
from collections.abc import Container, Iterable, Iterator
from typing import Any, NamedTuple

from ckptd.checkpoint.export.deepspeed import directory
from ckptd.checkpoint.export.deepspeed.archives import Archive, Range
from ckptd.checkpoint.export.deepspeed.model import Model
from ckptd.checkpoint.export.deepspeed.partitions import (
    MAX_STAGE,
    WEIGHTS,
    Partition,
    partition_of,
    ranges,
    ranks_of,
    stage_of,
)
from ckptd.checkpoint.export.plan import Box, Tensor
from ckptd.checkpoint.export.read import SourceFile
from ckptd.shared.base.errors import DamagedError, UsageError
from ckptd.shared.format.boxes import boxes_of
from ckptd.shared.format.dtypes import itemsize
from ckptd.shared.format.layout import Path
from ckptd.shared.format.placement import Shape
from ckptd.shared.torchfile import pickling
from ckptd.shared.torchfile.zip_write import Archive as NewArchive

_COUNT = struct.Struct("<f")
_HINT = "are the files of one save? leave the tensor out: name with --only what you want"


class _Part(NamedTuple):
    """What a tensor of the output is of a parameter or buffer: its WEIGHTS, or a state of the optimizer."""

    path: Path
    of: str
    state: str


class _Stage(NamedTuple):
    """One stage of a pipeline; without one, all. partitions: by rank."""

    model: Model
    partitions: list[Partition]

    def flat(self, name: str) -> dict[str, Range]:
        """By state, the flat tensors of the first rank that has something of a parameter."""
        return next((p.flat[p.slices[name][0].group] for p in self.partitions if name in p.slices), {})

    def single(self, name: str) -> dict[str, Range | float]:
        """By state, what that rank has once for the parameter's group."""
        return next((p.single[p.slices[name][0].group] for p in self.partitions if name in p.slices), {})

    def members(self, number: int) -> list[str]:
        """The parameters of a group of the optimizer."""
        groups = self.partitions[0].param_groups
        return (
            [name for group in groups[number][1] for name in self.model.shapes[group]] if number < len(groups) else []
        )


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
        self._stages = [self._stage(found) for found in directory.files_of(path)]
        self._check_stages()
        layers = [(number, self._open(name)) for number, name in directory.layers_of(path)]
        if layers:
            self._stages[0].model.add_layers(layers, [stage.model for stage in self._stages])
        self._owners = {name: stage for stage in reversed(self._stages) for name in stage.model.names}
        self._counts: dict[float, int] = {}  # of steps that no file has as a tensor, and which number each is here
        self._parts = {_name(part.path): part for part in (*self._weights(), *self._states())}
        self._settings = {_name(path): (path, value) for path, value in self._param_groups()}
        self.paths: dict[str, Path] = {name: part.path for name, part in self._parts.items()}
        self.paths |= {name: path for name, (path, _) in self._settings.items()}

    @property
    def step(self) -> int:
        """Steps of the optimizer, as the engine counted them."""
        return self._stages[0].model.step

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
                key = self._owners[part.of].model.holder(part.of), part.state
                found[name] = made[key] = made.get(key) or self._tensor(name, *key)
        return found

    def _open(self, path: str) -> Archive:
        self._archives.append(Archive(path, len(self._archives)))
        return self._archives[-1]

    def _stage(self, found: directory.Files) -> _Stage:
        first = self._open(found.optimizer[0])
        cut, ranks = stage_of(first) == MAX_STAGE, ranks_of(first)
        directory.check_ranks(found, ranks)
        model = Model([self._open(name) for name in directory.model_files(found, ranks if cut else 1)], cut=cut)
        opened = [first, *(self._open(name) for name in found.optimizer[1:])]
        return _Stage(model, [partition_of(one, model.shapes, ranks) for one in opened])

    def _check_stages(self) -> None:
        """Raises UsageError for a model that is cut in other ways, DamagedError for one that is not all there."""
        first = self._stages[0].model
        if first.sliced:
            raise UsageError(
                f"{self.path} is a checkpoint of tensor parallelism: that is not exported",
                hint="DeepSpeed's ds_to_universal.py converts it",
            )
        if first.parallel not in (None, len(self._stages)):
            raise DamagedError(
                f"{self.path}: the model was cut into {first.parallel} stages, of {len(self._stages)} there are files",
                hint="copy the others (mp_rank_*) from the nodes that wrote them, or take another tag",
            )
        _check_one_save([partition for stage in self._stages for partition in stage.partitions])

    def _tensor(self, name: str, of: str, state: str) -> Tensor:
        stage = self._owners[of]
        if of not in stage.model.trained:
            return _whole(name, *stage.model.uncut(of), where=self.path)
        single = stage.single(of).get(state)
        if single is None:
            return _whole(name, stage.model.trained[of], ranges(stage.partitions, of, state), where=self.path)
        if isinstance(single, float):
            number = self._counts.setdefault(single, len(self._counts))
            single = Range(len(self._archives), number * _COUNT.size, 1, "F32")
        return Tensor(name, single.dtype, (), (Box(single.file, single.start, (), ()),))

    # -- what there is --

    def _weights(self) -> Iterator[_Part]:
        for name in dict.fromkeys(name for stage in self._stages for name in stage.model.names):
            yield _Part((("k", "model"), ("k", name)), name, WEIGHTS)

    def _states(self) -> Iterator[_Part]:
        for name, stage in self._owners.items():
            for state in (*stage.flat(name), *stage.single(name)) if name in stage.model.trained else ():
                if state != WEIGHTS:
                    yield _Part((("k", "optimizer"), ("k", "state"), ("k", name), ("k", state)), name, state)

    def _param_groups(self) -> Iterator[tuple[Path, Any]]:
        """Of all stages, which have the same settings."""
        for number, (settings, _) in enumerate(self._stages[0].partitions[0].param_groups):
            names = [name for stage in self._stages for name in stage.members(number)]
            for key, value in {**settings, "params": list(dict.fromkeys(names))}.items():
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
    """The first step counter, as the file has it."""
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


def _whole(name: str, shape: Shape, ranges: Iterable[Range], *, where: str) -> Tensor:
    """The tensor that the ranges make, one after the other; of the last what is too much is padding.

    where: named in errors. Raises DamagedError, naming the tensor, when they are too few or of several dtypes.
    """
    boxes: list[Box] = []
    done, count = 0, math.prod(shape)
    dtype = ""
    for part in ranges:
        dtype = dtype or part.dtype
        if part.dtype != dtype:
            raise DamagedError(f"{where}: tensor {name!r} is {dtype} in one file, {part.dtype} in another", hint=_HINT)
        taken = min(part.elements, count - done)
        at = part.start
        for offsets, sizes in boxes_of(shape, done, done + taken):
            boxes.append(Box(part.file, at, offsets, sizes))
            at += math.prod(sizes) * itemsize(dtype)
        done += taken
    if done != count or not dtype:
        text = f"{where}: tensor {name!r} {list(shape)}: {count - done} of {count} elements are in no file"
        raise DamagedError(text, hint=_HINT)
    return Tensor(name, dtype, shape, tuple(boxes))
