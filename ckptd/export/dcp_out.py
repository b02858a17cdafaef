"""A directory as torch.distributed.checkpoint writes it: `__R_N.distcp` files and `.metadata`.

Each rank's boxes stay boxes, in files of that rank, so that readers of any layout read no more than they need. What one
rank holds of a tensor is a torch.save archive of its own. Values that are no tensors are rank 0's, as it saved them.
"""

import re
from collections.abc import Mapping, Sequence

import msgspec

from ckptd.dcp_metadata import MAX_BOXES, metadata_bytes
from ckptd.export.archive import Archive
from ckptd.export.names import Chosen
from ckptd.export.plan import Box, FilePlan, Tensor
from ckptd.export.torch_pickle import TensorRef, dumps
from ckptd.protocol.errors import UsageError
from ckptd.protocol.ids import SaveId
from ckptd.protocol.layout import VERSION, Layout, Path, TensorEntry, box_nbytes, itemsize
from ckptd.protocol.slot import PAGE, align_up

METADATA = ".metadata"
_FILE_RE = re.compile(r"^__[0-9]+_[0-9]+\.distcp$")
_OBJECTS = "__0_0.distcp"


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

    def add_box(self, names: Sequence[str], tensor: Tensor, box: Box, dtype: str) -> None:
        """An archive of the box, listed under each of the names."""
        nbytes, item = box_nbytes(dtype, box.sizes), itemsize(dtype)
        zipped = Archive(align_up(self.nbytes) if nbytes >= PAGE else self.nbytes)
        zipped.add("data.pkl", dumps(TensorRef(0, dtype, box.sizes, nbytes, nbytes // item)))
        zipped.add("byteorder", b"little")
        at = zipped.reserve("data/0", nbytes)
        zipped.add("version", b"3\n")
        zipped.close()
        self.blobs += zipped.blobs
        self.nbytes = zipped.start + zipped.nbytes
        if nbytes:
            whole = msgspec.structs.replace(box, offsets=(0,) * len(box.sizes))
            self.targets.append((Tensor(tensor.name, tensor.dtype, box.sizes, (whole,)), dtype, at))
        self.entries += [
            TensorEntry(
                name, dtype, tensor.shape, box.offsets, box.sizes, at, nbytes, zipped.start, zipped.nbytes
            ) for name in names
        ]  # fmt: skip

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
    chosen: Sequence[Chosen], leaves: Mapping[str, bytes], paths: Mapping[str, Path], save: SaveId, max_nbytes: int
) -> list[FilePlan]:
    """The files of all ranks, none above the maximum unless by a single box, and last `.metadata`.

    leaves: a torch.save archive each. paths: places in the nesting. Raises UsageError when torch cannot open so many.
    """
    names: dict[str, list[str]] = {}
    for one in chosen:
        names.setdefault(one.tensor.name, []).append(one.name)
    files: dict[int, list[_File]] = {}
    index = {}
    for name, data in leaves.items():
        index[name] = (_file(files, 0, len(data), None).add_bytes(data), len(data))
    for one in chosen:
        for box in _boxes(one) if names[one.tensor.name][0] == one.name else ():
            nbytes = box_nbytes(one.dtype, box.sizes)
            _file(files, box.file, nbytes, max_nbytes).add_box(names[one.tensor.name], one.tensor, box, one.dtype)
    ordered = [file for rank in sorted(files) for file in files[rank]]
    layouts = [file.layout(dict(paths) if i == 0 else {}) for i, file in enumerate(ordered)]
    raw = metadata_bytes(layouts, index, checkpoint_id=save.dirname, save_id=save.text, objects_file=_OBJECTS)
    if raw is None:
        raise UsageError(f"more than {MAX_BOXES} boxes, too many for torch", hint="export as safetensors")
    return [*(file.plan() for file in ordered), FilePlan(METADATA, len(raw), ((0, raw),), (), ())]


def is_output(name: str) -> bool:
    """Whether a file of an earlier export may have this name."""
    return name == METADATA or _FILE_RE.match(name) is not None


def _boxes(one: Chosen) -> tuple[Box, ...]:
    """Of an empty tensor one too: its reader wants to find it."""
    zeros = (0,) * len(one.tensor.shape)
    return one.tensor.boxes or (Box(0, 0, zeros, one.tensor.shape),)


def _file(files: dict[int, list[_File]], rank: int, nbytes: int, max_nbytes: int | None) -> _File:
    """The rank's file that has room, a new one if none has."""
    own = files.setdefault(rank, [])
    if not own or (max_nbytes is not None and own[-1].nbytes and own[-1].nbytes + nbytes > max_nbytes):
        own.append(_File(f"__{rank}_{len(own)}.distcp", rank))
    return own[-1]
