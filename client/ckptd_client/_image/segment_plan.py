"""The layout of a segment: the place of each box, and the size of a slot for it; and what is no tensor."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ckptd.shared.format.layout import box_nbytes
from ckptd.shared.format.replica_attestations import Attestation
from ckptd.shared.format.slot import slot_capacity
from ckptd.shared.torchfile.image import Image
from ckptd_client._state.tensors import DTYPE_OF, copied_as

_PLAIN_ROOM = 64 << 10  # at least so many bytes are kept for plain values, which change size from save to save


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentPlan:
    """Constant from save to save. Holds no tensor of the state."""

    image: Image  # headers, fillers and offsets
    layout: bytes  # encoded Layout
    layout_digest: bytes
    plan_id: str  # equal for plans that write the same bytes in the same places

    @property
    def nbytes(self) -> int:
        """Bytes of the image."""
        return self.image.image_nbytes

    def capacity(self, plain_nbytes: int) -> int:
        """Bytes of a slot that holds this plan and plain values of twice the size."""
        return slot_capacity(self.nbytes, len(self.layout), max(_PLAIN_ROOM, 2 * plain_nbytes))

    def exact_capacity(self, plain_nbytes: int) -> int:
        """Bytes of the smallest slot that holds this plan and so many bytes of plain values."""
        return slot_capacity(self.nbytes, len(self.layout), plain_nbytes)

    def views(self, slot: torch.Tensor) -> list[torch.Tensor]:
        """The places of the boxes in a slot, as tensors over its bytes, in the order of the image's boxes."""
        views = []
        for box, offset in zip(self.image.boxes, self.image.data_offsets, strict=True):
            nbytes, dtype = box_nbytes(box.dtype, box.sizes), copied_as(DTYPE_OF[box.dtype])
            if nbytes:
                views.append(slot[offset : offset + nbytes].view(dtype).view(box.sizes))
            else:  # in a plain image they come last, without alignment
                views.append(slot.new_empty(box.sizes, dtype=dtype))
        return views


@dataclass(frozen=True, slots=True)
class Plain:
    """Encoded plain values of one save."""

    leaves: bytes  # this rank's Leaves
    objects: bytes  # StockObjects: the leaves again, for stock readers; only on rank 0
    attest: Callable[[], tuple[Attestation, ...]] = tuple

    @property
    def attestations(self) -> tuple[Attestation, ...]:
        """The attestation of replicated tensors. Blocks until it is computed."""
        return self.attest()

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return len(self.leaves) + len(self.objects)
