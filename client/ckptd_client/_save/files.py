"""``Client.save_files``: a trainer's files as a raw image, a header page, then each file as it will be on the store."""

import os
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec
import torch

from ckptd.shared.base.errors import UsageError
from ckptd.shared.base.ids import MAX_PARTS, JobKey
from ckptd.shared.files.paths import resolved
from ckptd.shared.format.integrity import XXH3, Integrity, Purpose
from ckptd.shared.format.layout import (
    VERSION,
    Layout,
    Leaves,
    SavedFor,
    TensorEntry,
    encode_leaves,
    extents,
    is_trainer_file,
)
from ckptd.shared.format.origin import MARKER
from ckptd.shared.format.packed_layout import encode_layout
from ckptd.shared.protocol.publication import Publication, check_publication
from ckptd.shared.torchfile.image import Filler, Image, Part, make_image, make_layout
from ckptd_client._image.file_bytes import FileBytes
from ckptd_client._image.plan import check_readable
from ckptd_client._image.segment_plan import Plain, SegmentPlan
from ckptd_client._local.rank import Group
from ckptd_client._local.save_record import SaveRecord
from ckptd_client._save.staging import Staging
from ckptd_client.files import TrainerFile, lay_out

_PLAIN = Plain(leaves=encode_leaves(Leaves(VERSION, {})), objects=b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesPlan(SegmentPlan):
    """The plan of one save's files and the places of their tensors. For this save alone; refers to the tensors."""

    offsets: list[int]  # in the image, for each of flats
    flats: list[torch.Tensor]

    def views(self, slot: torch.Tensor) -> list[torch.Tensor]:
        """The places in a slot of the bytes of each of flats."""
        return [slot[at : at + flat.numel()] for at, flat in zip(self.offsets, self.flats, strict=True)]


def publication_of(
    directory: str | os.PathLike[str] | None,
    *,
    whole: bool,
    pointer: tuple[str | os.PathLike[str], str] | None,
    job: JobKey,
) -> Publication | None:
    """The publication of the files once they are committed. Raises UsageError."""
    if directory is None:
        if pointer is not None:
            raise UsageError("a pointer to files that are published nowhere", hint="give a directory too")
        return None
    at, text = (_absolute(pointer[0]), pointer[1]) if pointer is not None else ("", "")
    to = Publication(_absolute(directory), whole, at, text)
    check_publication(to, job)
    return to


def _absolute(path: str | os.PathLike[str]) -> str:
    return resolved(os.fspath(path))


def make_files_plan(
    files: Mapping[str, TrainerFile], saved_for: SavedFor | None, group: Group, integrity: Integrity = XXH3
) -> FilesPlan:
    """Plans the layout of files. Raises UsageError for a bad name or file, and errors of pickle."""
    _check_names(files)
    laid = {name: lay_out(file) for name, file in files.items()}
    first = make_image([], rank=group.rank, world_size=group.world_size, dual=False)
    sizes = [first.image_nbytes, *(file.nbytes for file in laid.values())]
    starts = [extent.start for extent in extents(group.rank, 0, sizes, raw=True)]
    image = _image(first, list(laid.values()), starts)
    made = _layout(image, list(laid), saved_for)
    layout = encode_layout(made)
    check_readable(layout, made.tensors)
    placed = [
        (at + offset, flat) for at, file in zip(starts[1:], laid.values(), strict=True) for offset, flat in file.copies
    ]
    return FilesPlan(
        image=image,
        layout=layout,
        layout_digest=integrity.digest(layout, Purpose.LAYOUT),
        plan_id=image.plan_id,
        offsets=[at for at, _ in placed],
        flats=[flat for _, flat in placed],
    )


def _check_names(files: Mapping[str, TrainerFile]) -> None:
    if len(files) >= MAX_PARTS:
        raise UsageError(f"{len(files)} files of one rank, at most {MAX_PARTS - 1}", hint="put several into one")
    for name in files:
        if not is_trainer_file(name):
            raise UsageError(f"{name!r} is no path of a file below a directory", hint="such as 'rank0/optimizer.pt'")
        if name == MARKER:
            raise UsageError(f"{name!r} is the name of a file of ckptd's own", hint="choose another")
        folder = next((above for above in _above(name) if above in files), None)
        if folder is not None:
            raise UsageError(f"{folder!r} is a file, and {name!r} lies below it", hint="choose another name for one")


def _above(name: str) -> Iterator[str]:
    while name := os.path.dirname(name):
        yield name


def _image(first: Image, files: list[FileBytes], starts: list[int]) -> Image:
    parts, fillers = [*first.parts], []
    end = first.image_nbytes
    for start, file in zip(starts[1:], files, strict=True):
        if start > end:
            fillers.append(Filler(end, bytes(start - end)))  # the slot may have bytes of an earlier save there
        parts.append(Part(start, file.nbytes, b""))
        fillers += [Filler(start + offset, data) for offset, data in file.known]
        end = start + file.nbytes
    return Image(
        boxes=[],
        data_offsets=[],
        slices=[],
        fillers=fillers,
        parts=parts,
        image_nbytes=end,
        plan_id=secrets.token_hex(16),  # the bytes between the tensors belong to this save
        rank=first.rank,
        world_size=first.world_size,
    )


def _layout(image: Image, names: list[str], saved_for: SavedFor | None) -> Layout:
    """The layout of the image, in which each file is a tensor of bytes."""
    files = zip(names, image.parts[1:], strict=True)
    return msgspec.structs.replace(
        make_layout(image, paths={name: (("k", name),) for name in names}, aliases={}),
        tensors=[TensorEntry(n, "U8", (p.nbytes,), (0,), (p.nbytes,), p.start, p.nbytes) for n, p in files],
        names=names,
        saved_for=saved_for,
    )


def save_files(
    staging: Staging,
    files: Mapping[str, TrainerFile],
    step: int | None,
    publication: Publication | None,
    *,
    drain: bool,
) -> SaveRecord:
    """See Client.save_files."""
    began = time.perf_counter()
    handle = staging.open(staging.numbers.name(staging.numbers.count(), step))
    handle.held_since = began
    try:
        saved_for = publication.said if publication is not None else None
        plan = make_files_plan(files, saved_for, staging.group, staging.integrity)
    except BaseException as error:  # a misuse, perhaps on this rank alone: the others must not wait for it
        staging.give_up(handle, error)
        raise
    try:
        segment = staging.fill(plan, plan.flats, _PLAIN.nbytes, owner=handle)
        staging.seal(segment, handle, _PLAIN, drain=drain, publication=_with_names(publication, files))
    except Exception as error:  # noqa: BLE001 - training continues after any error
        staging.give_up(handle, error)
    except BaseException as error:  # for example Ctrl-C: the others must not wait for this rank
        staging.give_up(handle, error)
        raise
    handle.held_since = None
    handle.stall_s += time.perf_counter() - began
    staging.stats.stall_s += handle.stall_s
    staging.stats.last_stall_s = handle.stall_s
    return handle


def _with_names(publication: Publication | None, files: Mapping[str, TrainerFile]) -> Publication | None:
    """The publication that this rank sends to its daemon: the directory, and the names of its own files."""
    return msgspec.structs.replace(publication, names=tuple(sorted(files))) if publication is not None else None
