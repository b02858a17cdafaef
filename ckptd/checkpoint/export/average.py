"""The last committed checkpoints of a job as one source, whose floating-point tensors are averaged when written."""

import os
from collections.abc import Container
from typing import ClassVar

import msgspec

from ckptd.checkpoint.export.casts import FLOATS
from ckptd.checkpoint.export.deepspeed.source import ZeroCheckpoint
from ckptd.checkpoint.export.plan import Box, Tensor
from ckptd.checkpoint.export.read import SourceFile
from ckptd.checkpoint.export.source import Checkpoint, find, load
from ckptd.shared.base.errors import DamagedError, UsageError
from ckptd.shared.base.ids import parse_dirname
from ckptd.shared.format.integrity import XXH3, Integrity
from ckptd.shared.format.layout import Path
from ckptd.store.opening import open_store


class Averaged:
    """The newest of several checkpoints, with the floating-point tensors of all; all else is the newest's."""

    flat: ClassVar[bool] = True  # the checkpoints may be cut in different ways

    def __init__(self, checkpoints: list[Checkpoint]) -> None:
        """checkpoints: two or more, the newest first."""
        self._newest, *self._older = checkpoints
        self.files: list[SourceFile] = [file for one in checkpoints for file in one.files]
        self.steps = [one.step for one in checkpoints]
        self.step, self.incarnation, self.save_id = self._newest.step, self._newest.incarnation, self._newest.save_id
        self.path, self.leaves = self._newest.path, self._newest.leaves

    @property
    def names(self) -> list[str]:
        """Of the newest's tensors, in the order of the state."""
        return self._newest.names

    @property
    def paths(self) -> dict[str, Path]:
        """Of the newest's names."""
        return self._newest.paths

    def stock_leaves(self) -> dict[str, bytes]:
        """The newest's."""
        return self._newest.stock_leaves()

    def tensors(self, names: Container[str]) -> dict[str, Tensor]:
        """Those of these names, each with the ones that it is averaged with.

        Raises UsageError for a tensor that an older checkpoint does not have alike; DamagedError as whole_tensors does.
        """
        found = self._newest.tensors(names)
        wanted = {name: one for name, one in found.items() if one.dtype in FLOATS}
        more: dict[str, list[Tensor]] = {name: [] for name in wanted}
        first = len(self._newest.files)
        for older in self._older:
            theirs = older.tensors(wanted)
            for name, tensor in wanted.items():
                more[name].append(_shifted(_alike(tensor, name, theirs.get(name), older), first))
            first += len(older.files)
        made: dict[str, Tensor] = {}  # tied names stay one tensor
        for name, tensor in wanted.items():
            summed = msgspec.structs.replace(tensor, others=tuple(more[name]) if tensor.boxes else ())
            found[name] = made.setdefault(tensor.name, summed)
        return found


Source = Checkpoint | ZeroCheckpoint | Averaged  # what can be exported, opened


def _alike(tensor: Tensor, name: str, other: Tensor | None, older: Checkpoint) -> Tensor:
    if other is None or (other.dtype, other.shape) != (tensor.dtype, tensor.shape):
        has = f"has {other.dtype} {list(other.shape)}" if other else "has none"
        raise UsageError(
            f"tensor {name!r} is {tensor.dtype} {list(tensor.shape)}, and step {older.step} {has} of that name",
            hint=f"average fewer checkpoints, or leave it out with --only; ckptd verify {older.path}",
        )
    return other


def _shifted(tensor: Tensor, first: int) -> Tensor:
    """With the numbers of the files among those of all checkpoints."""
    boxes = tuple(Box(box.file + first, box.start, box.offsets, box.sizes) for box in tensor.boxes)
    return msgspec.structs.replace(tensor, boxes=boxes)


def load_last(path: str, count: int, integrity: Integrity = XXH3) -> tuple[Averaged, list[str]]:
    """The last so many checkpoints of the job's directory at path, or up to the checkpoint that path is.

    And what is wrong with others of the job. Raises UsageError when there are fewer; DamagedError or OSError.
    """
    newest, _ = find(path, integrity)
    directory, name = os.path.split(newest)
    if parse_dirname(name) is None:
        raise UsageError(f"{newest} is no checkpoint of a job", hint="give the job's directory, or a checkpoint in it")
    store, job = os.path.split(directory)
    there = open_store(store, integrity).scan(job)
    names = [entry.dirname for entry in there.committed]  # newest first
    if name not in names:
        raise DamagedError(f"{newest} is not committed, or damaged", hint=f"ckptd verify {newest}")
    names = names[names.index(name) :][:count]
    if len(names) < count:
        has = f"{len(names)} committed checkpoint{'s' if len(names) > 1 else ''} up to {name}"
        raise UsageError(f"job {job} has {has}, not {count}", hint=f"ckptd list {directory}; keep_last keeps more")
    found = [load(os.path.join(directory, one), integrity) for one in names]
    doubts = [f"step {one.step}: {one.doubted}" for one in found if one.doubted]
    return Averaged(found), [*doubts, *there.problems]
