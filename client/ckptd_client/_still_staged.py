"""Whether a trainer's files are still what an earlier save staged of them. A part of Client in a file of its own."""
# ruff: noqa: SLF001 - see above

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from ckptd.protocol.ids import SaveId
from ckptd.protocol.layout import decode_layout
from ckptd.protocol.slot import SEALS_NBYTES, Seal, SlotState, decode_seals
from ckptd_client import _segments as segments
from ckptd_client._file_bytes import FileBytes
from ckptd_client._slots import SlotMap
from ckptd_client.files import TrainerFile, lay_out

if TYPE_CHECKING:
    from ckptd_client.client import Client


def are_still(client: "Client", save: SaveId, files: Mapping[str, TrainerFile]) -> bool:
    """Whether each of these, laid out now, has the very bytes that this rank's slot has of it.

    False also when the slot is not the save's any more. Reads all of both; blocks at most save_timeout_s before that.
    Raises what pickling raises.
    """
    with client._first(segments.deadline_of(client)) as mine:  # so nobody is given the slot meanwhile
        found = _slot_of(client, save) if mine else None
        if found is None:
            return False
        slot, seal = found
        raw = bytes(slot.memory[seal.layout_offset : seal.leaves_offset])
        starts = {entry.name: (entry.data_offset, entry.nbytes) for entry in decode_layout(raw, where="slot").tensors}
        for name, file in files.items():
            laid = lay_out(file)
            start, nbytes = starts.get(name, (0, -1))
            if laid.nbytes != nbytes or not _same(slot, start, laid):
                return False
        return True


def _slot_of(client: "Client", save: SaveId) -> tuple[SlotMap, Seal] | None:
    link = client._link
    for slot in link.slots.lent():
        seal = decode_seals(bytes(slot.memory[-SEALS_NBYTES:]))[2]
        if (seal.job, seal.save) == (link.job, save) and seal.state in {SlotState.SEALED, SlotState.DIGESTED}:
            return slot, seal
    return None


def _same(slot: SlotMap, start: int, laid: FileBytes) -> bool:
    return all(slot.memory[start + at : start + at + len(data)] == data for at, data in laid.known) and all(
        torch.equal(slot.bytes[start + at : start + at + flat.numel()], flat.cpu()) for at, flat in laid.copies
    )
