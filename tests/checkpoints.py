"""Committed checkpoints made by the client's and the store's own code, in one process and without a daemon."""

import os
from pathlib import Path
from typing import Any

import torch

from ckptd.shared.base.ids import JobKey, SaveId, file_name
from ckptd.shared.format.digest import blocks
from ckptd.shared.format.integrity import XXH3, Integrity
from ckptd.shared.format.layout import VERSION as LAYOUT_VERSION
from ckptd.shared.format.layout import Leaves, SavedFor, encode_leaves
from ckptd.shared.format.manifest import FileRecord, StockObjects, Vote, decode_objects
from ckptd.shared.format.packed_layout import parted
from ckptd.shared.format.sealed_record import VERSION
from ckptd.shared.format.slot import align_up
from ckptd.store.image import Flow, Image
from ckptd.store.posix.commit import commit, write_vote
from ckptd.store.posix.image_writer import make_set, write_image
from ckptd.store.posix.scan import Place
from ckptd.system.files import FileLayer
from ckptd_client._image.plan import gather, make_plan
from ckptd_client._image.segment_plan import SegmentPlan
from ckptd_client._image.stock_objects import StockLeaves
from ckptd_client._local.rank import Group
from ckptd_client._save.files import make_files_plan
from tests.runs import RUN, SET, STORE_ID

State = dict[str, Any]
SAVE = SaveId(1, 1, 10, RUN)


def image_of(
    state: State, save: SaveId, *, rank: int = 0, world_size: int = 1, integrity: Integrity = XXH3,
    metadata: State | None = None, **options: Any,
) -> tuple[bytes, FileRecord, bytes]:  # fmt: skip
    """What a rank leaves in its slot: image, its record, and the encoded objects (of rank 0). options: make_plan's."""
    plan = make_plan(state, rank=rank, world_size=world_size, integrity=integrity, **options)
    values = gather(plan, state, StockLeaves() if rank == 0 else None, None, (metadata or {}) if rank == 0 else {})
    memory = torch.zeros(align_up(plan.nbytes), dtype=torch.uint8)
    if values.tensors:
        with torch.no_grad():
            torch._foreach_copy_(plan.views(memory), values.tensors)
    image = filled(plan, memory, save)
    record = FileRecord(
        name=file_name(rank), rank=rank, nbytes=len(image), digests=digests_of(image, integrity),
        **parted(plan.layout, "plan")._asdict(),
        leaves=values.plain.leaves, parts=plan.image.part_nbytes,
    )  # fmt: skip
    return image, record, values.plain.objects


def image_of_files(
    files: dict[str, bytes], save: SaveId, saved_for: SavedFor | None, integrity: Integrity = XXH3
) -> tuple[bytes, FileRecord]:
    """The same of a lone rank's `save_files`."""
    plan = make_files_plan(files, saved_for, Group(0, 1, "test"), integrity)
    memory = torch.zeros(align_up(plan.nbytes), dtype=torch.uint8)
    for view, flat in zip(plan.views(memory), plan.flats, strict=True):
        view.copy_(flat)
    image = filled(plan, memory, save)
    record = FileRecord(
        name=file_name(0), rank=0, nbytes=len(image), digests=digests_of(image, integrity),
        **parted(plan.layout, "plan")._asdict(),
        leaves=encode_leaves(Leaves(LAYOUT_VERSION, {})), parts=plan.image.part_nbytes, raw=True,
    )  # fmt: skip
    return image, record


def filled(plan: SegmentPlan, memory: torch.Tensor, save: SaveId) -> bytes:
    """The image with what is not copied from tensors."""
    image = bytearray(memory.numpy().tobytes()[: plan.nbytes])
    for start, data in [*plan.image.fillers, *plan.image.patched_headers(save)]:
        image[start : start + len(data)] = data
    return bytes(image)


def digests_of(image: bytes, integrity: Integrity) -> bytes:
    """Of each block."""
    return b"".join(integrity.digest(image[start:stop]) for start, stop in blocks(len(image)))


def put_image(place: Place, record: FileRecord, image: bytes) -> None:
    """An image into the save's hidden directory, as a drain does it."""
    fs = FileLayer()
    make_set(fs, place, SET)
    padded = memoryview(image.ljust(align_up(len(image)), b"\0"))
    for name, start, nbytes in record.extents():
        write_image(fs, place, SET, Image(name, nbytes, padded[start:]), Flow())


def put_vote(
    place: Place, records: list[FileRecord], *, world_size: int, node: str, objects: StockObjects | None,
    integrity: Integrity = XXH3,
):  # fmt: skip
    """A node's vote for these."""
    vote = Vote(
        version=VERSION, digest_kind=integrity.kind, store_id=STORE_ID, job=place.key.job, save=place.save, node=node,
        folder=SET, world_size=world_size, files=records, stock_objects=objects, key_id=integrity.key_id,
    )  # fmt: skip
    write_vote(FileLayer(integrity=integrity), place.key, vote)


def write_checkpoint(
    store: Path | str, states: list[State], *, job: str = "demo", save: SaveId = SAVE, writer: str = "test",
    integrity: Integrity = XXH3, dual: bool = True, metadata: State | None = None,
) -> Path:  # fmt: skip
    """A committed checkpoint of one state per rank, each on a node of its own. Returns its directory."""
    os.makedirs(store, exist_ok=True)
    place = Place(JobKey(str(store), job), save)
    for rank, state in enumerate(states):
        image, record, objects = image_of(
            state, save, rank=rank, world_size=len(states), integrity=integrity, dual=dual, metadata=metadata
        )
        put_image(place, record, image)
        found = decode_objects(objects, where="objects") if objects else None
        put_vote(place, [record], world_size=len(states), node=f"node{rank}", objects=found, integrity=integrity)
    commit(FileLayer(integrity=integrity), place.key, save, writer)
    return Path(place.final)


def write_files(
    key: JobKey, save: SaveId, files: dict[str, bytes], saved_for: SavedFor | None, integrity: Integrity = XXH3
) -> Path:
    """A committed checkpoint of a trainer's files, which nobody here has published. Returns its directory."""
    place = Place(key, save)
    image, record = image_of_files(files, save, saved_for, integrity)
    put_image(place, record, image)
    put_vote(place, [record], world_size=1, node="node0", objects=None, integrity=integrity)
    commit(FileLayer(integrity=integrity), key, save, "test")
    return Path(place.final)
