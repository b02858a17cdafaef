"""A directory as torch.distributed.checkpoint writes it: `__R_N.distcp` files and `.metadata`.

Each rank's boxes stay boxes, in files of that rank, so that readers of any layout read no more than they need; where
ranks hold ranges of elements, boxes are whole rows. Each is a torch.save archive of its own. Values that are no tensors
are rank 0's, as it saved them.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ckptd.checkpoint.export.average import Source
from ckptd.checkpoint.export.names import Chosen
from ckptd.checkpoint.export.plan import Box, FilePlan, Tensor, rows_of
from ckptd.shared.base.errors import UsageError
from ckptd.shared.format.layout import VERSION, Layout, Path, TensorEntry, box_nbytes
from ckptd.shared.format.placement import Shape
from ckptd.shared.format.slot import PAGE, align_up
from ckptd.shared.torchfile.dcp_metadata import MAX_BOXES, metadata_bytes
from ckptd.shared.torchfile.pickling import TensorRef, dumps
from ckptd.shared.torchfile.zip_write import Archive

METADATA = ".metadata"
_FILE_RE = re.compile(r"^__[0-9]+_[0-9]+\.distcp$")
_OBJECTS = "__0_0.distcp"
_ROWS_NBYTES = 16 << 20


class Cut(NamedTuple):
    """A box of the output, as a tensor of its own, whose boxes are in the source. rank: whose file has it."""

    rank: int
    offsets: Shape
    content: Tensor


class _File:
    """A file being laid out. entries: what `.metadata` says of it."""

    def __init__(self, name: str, rank: int) -> None:
        self.name = name
        self.rank = rank
        self.nbytes = 0
        self.blobs: list[tuple[int, bytes]] = []
        self.targets: list[tuple[Tensor, str, int]] = []
        self.entries: list[TensorEntry] = []

    def add_bytes(self, data: bytes) -> int:
        """Bytes as they are; where they begin."""
        at = self.nbytes
        self.blobs.append((at, data))
        self.nbytes += len(data)
        return at

    def add_box(self, names: Sequence[str], shape: Shape, cut: Cut, dtype: str) -> None:
        """An archive of a box of a tensor of this shape, listed under each of the names."""
        sizes = cut.content.shape
        nbytes = box_nbytes(dtype, sizes)
        zipped = Archive(align_up(self.nbytes) if nbytes >= PAGE else self.nbytes)
        zipped.add("data.pkl", dumps(TensorRef(0, dtype, sizes, nbytes)))
        zipped.add("byteorder", b"little")
        at = zipped.reserve("data/0", nbytes)
        zipped.add("version", b"3\n")
        zipped.close()
        self.blobs += zipped.blobs
        self.nbytes = zipped.start + zipped.nbytes
        if nbytes:
            self.targets.append((cut.content, dtype, at))
        self.entries += [
            TensorEntry(name, dtype, shape, cut.offsets, sizes, at, nbytes, zipped.start, zipped.nbytes)
            for name in names
        ]

    def plan(self) -> FilePlan:
        """The file as it is to be written."""
        names = dict.fromkeys(entry.name for entry in self.entries)
        return FilePlan(self.name, self.nbytes, tuple(self.blobs), tuple(self.targets), tuple(names))

    def layout(self, paths: dict[str, Path]) -> Layout:
        """The same as a rank's layout, which `.metadata` is made from."""
        return Layout(
            version=VERSION, file=self.name, rank=self.rank, world_size=1, header_nbytes=0, image_nbytes=self.nbytes,
            plan_id="", tensors=self.entries, paths=paths, aliases={},
        )  # fmt: skip


def plan_files(
    chosen: Sequence[Chosen], leaves: Mapping[str, bytes], paths: Mapping[str, Path], save: Source, max_nbytes: int
) -> list[FilePlan]:
    """The files of all ranks, none above the maximum unless by a single box, and last `.metadata`.

    leaves: a torch.save archive each. paths: places in the nesting. Raises UsageError when torch cannot open so many.
    """
    cut = _by_rows if save.flat else _as_held
    names: dict[str, list[str]] = {}
    for one in chosen:
        names.setdefault(one.tensor.name, []).append(one.name)
    files: dict[int, list[_File]] = {}
    index = {}
    for name, data in leaves.items():
        index[name] = (_file(files, 0, len(data), None).add_bytes(data), len(data))
    for one in chosen:
        for box in cut(one.tensor) if names[one.tensor.name][0] == one.name else ():
            nbytes = box_nbytes(one.dtype, box.content.shape)
            file = _file(files, box.rank, nbytes, max_nbytes)
            file.add_box(names[one.tensor.name], one.tensor.shape, box, one.dtype)
    ordered = [file for rank in sorted(files) for file in files[rank]]
    layouts = [file.layout(dict(paths) if i == 0 else {}) for i, file in enumerate(ordered)]
    raw = metadata_bytes(
        layouts, index, checkpoint_id=os.path.basename(save.path), save_id=save.save_id, objects_file=_OBJECTS
    )
    if raw is None:
        raise UsageError(f"more than {MAX_BOXES} boxes, too many for torch", hint="export as safetensors")
    return [*(file.plan() for file in ordered), FilePlan(METADATA, len(raw), ((0, raw),), (), ())]


def is_output(name: str) -> bool:
    """Whether a file of an earlier export may have this name."""
    return name == METADATA or _FILE_RE.match(name) is not None


def _as_held(tensor: Tensor) -> Iterator[Cut]:
    """The boxes of the ranks. Of an empty tensor one too: its reader wants to find it."""
    zeros = (0,) * len(tensor.shape)
    for box in tensor.boxes or (Box(0, 0, zeros, tensor.shape),):
        whole = msgspec.structs.replace(box, offsets=zeros)
        yield Cut(box.file, box.offsets, Tensor(tensor.name, tensor.dtype, box.sizes, (whole,) if tensor.boxes else ()))


def _by_rows(tensor: Tensor) -> Iterator[Cut]:
    """Whole rows, so many that a reader of some of them reads little more; all in the files of rank 0.

    For tensors whose boxes fell as they did: nobody wants the same.
    """
    shape = tensor.shape
    if not tensor.boxes or not shape:
        yield Cut(0, (0,) * len(shape), tensor)
        return
    step = max(1, _ROWS_NBYTES // box_nbytes(tensor.dtype, shape[1:]))
    for first in range(0, shape[0], step):
        yield Cut(0, (first, *(0 for _ in shape[1:])), rows_of(tensor, first, min(first + step, shape[0])))


def _file(files: dict[int, list[_File]], rank: int, nbytes: int, max_nbytes: int | None) -> _File:
    """The rank's file that has room, a new one if none has."""
    own = files.setdefault(rank, [])
    if not own or (max_nbytes is not None and own[-1].nbytes and own[-1].nbytes + nbytes > max_nbytes):
        own.append(_File(f"__{rank}_{len(own)}.distcp", rank))
    return own[-1]
