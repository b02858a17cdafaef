"""Compares files, or a state, with what an earlier save staged of them."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ckptd.shared.base.errors import UsageError
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.layout import Layout, TensorEntry, decode_leaves
from ckptd.shared.format.packed_layout import decode_layout
from ckptd.shared.format.slot import SEALS_NBYTES, Seal, SlotState, decode_seals
from ckptd_client._image.file_bytes import FileBytes
from ckptd_client._local.slots import SlotMap
from ckptd_client._save.staging import Staging
from ckptd_client._state import pickle as pickling
from ckptd_client._state.tensors import CODE_OF, copyable, is_tensor, shard_of
from ckptd_client.files import TrainerFile, lay_out


def are_still(staging: Staging, save: SaveId, files: Mapping[str, TrainerFile]) -> bool:
    """Whether the bytes of each file are equal to those in this rank's slot.

    False also if the slot is not the save's any more. Reads all of both; blocks at most save_timeout_s before that.
    Raises errors of pickle.
    """
    with _slot_kept(staging, save) as found:
        if found is None:
            return False
        slot, seal = found
        starts = {entry.name: (entry.data_offset, entry.nbytes) for entry in _layout(slot, seal).tensors}
        for name, file in files.items():
            laid = lay_out(file)
            start, nbytes = starts.get(name, (0, -1))
            if laid.nbytes != nbytes or not _same(slot, start, laid):
                return False
        return True


def is_still(staging: Staging, save: SaveId, state: Mapping[str, Any]) -> bool:
    """Whether names, plain values and bytes of a flat state are equal to those in this rank's slot.

    Other ranks compare the parts that they wrote. False also if the slot is not the save's any more. Reads all of both;
    blocks at most save_timeout_s before that.
    """
    with _slot_kept(staging, save) as found:
        if found is None:
            return False
        slot, seal = found
        layout = _layout(slot, seal)
        raw = bytes(slot.memory[seal.leaves_offset : seal.objects_offset])
        leaves = decode_leaves(raw, where="slot").leaves
        if layout.paths.keys() != state.keys():
            return False
        try:
            plain = {
                name: pickling.encode(value, name, repr(name), allowed=staging.link.settings.pickle_keys.allow(name))
                for name, value in state.items()
                if not is_tensor(value)
            }
            return plain == leaves and all(_is_box(slot, entry, state[entry.name]) for entry in layout.tensors)
        except UsageError:
            return False  # the save raises it


def _is_box(slot: SlotMap, entry: TensorEntry, value: Any) -> bool:
    if not is_tensor(value):
        return False
    shard = shard_of(value, repr(entry.name))
    box = entry.offsets, entry.sizes
    local = next((chunk.local.detach() for chunk in shard.chunks if chunk.box == box), None)
    if local is None or CODE_OF[local.dtype] != entry.dtype or shard.global_shape != entry.global_shape:
        return False
    flat = copyable(local).contiguous().view(-1).view(torch.uint8)
    return _equal(slot.bytes[entry.data_offset : entry.data_offset + entry.nbytes], flat.cpu())


@contextlib.contextmanager
def _slot_kept(staging: Staging, save: SaveId) -> Iterator[tuple[SlotMap, Seal] | None]:
    """The save's slot, which stays its slot while inside; None if it is another's, or the client is busy."""
    with staging.first(staging.until()) as mine:
        yield _slot_of(staging, save) if mine else None


def _layout(slot: SlotMap, seal: Seal) -> Layout:
    return decode_layout(bytes(slot.memory[seal.layout_offset : seal.leaves_offset]), where="slot")


def _slot_of(staging: Staging, save: SaveId) -> tuple[SlotMap, Seal] | None:
    link = staging.link
    for slot in link.slots.lent():
        seal = decode_seals(bytes(slot.memory[-SEALS_NBYTES:]), link.settings.integrity)[2]
        if (seal.job, seal.save) == (link.job, save) and seal.state in {SlotState.SEALED, SlotState.DIGESTED}:
            return slot, seal
    return None


def _same(slot: SlotMap, start: int, laid: FileBytes) -> bool:
    return all(slot.memory[start + at : start + at + len(data)] == data for at, data in laid.known) and all(
        _equal(slot.bytes[start + at : start + at + flat.numel()], flat.cpu()) for at, flat in laid.copies
    )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compares flat uint8 tensors on the host, eight bytes at a time if both are aligned: six times as fast."""
    if one.numel() != other.numel():
        return False
    aligned = one.storage_offset() % 8 == 0 == other.storage_offset() % 8
    words = one.numel() // 8 * 8 if aligned else 0
    if not torch.equal(one[:words].view(torch.int64), other[:words].view(torch.int64)):
        return False
    return torch.equal(one[words:], other[words:])
