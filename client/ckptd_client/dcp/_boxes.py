"""A tensor in boxes, as DCP's planners can take it, one write item and chunk for each; and a planner that uses it."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from ckptd_client._state.strided import is_interleaving
from ckptd_client._state.tensors import Chunk, shard_of


class Boxes(torch.Tensor):
    """This rank's boxes of a tensor of the given shape. It answers DCP's questions and computes nothing.

    The boxes are the caller's memory, of which it holds references.
    """

    _chunks: tuple[Chunk, ...]

    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, chunks: Sequence[Chunk]) -> Self:
        """No memory of its own."""
        made: Self = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype)  # noqa: SLF001 - torch's way to make one
        made._chunks = tuple(chunks)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} of a tensor that only describes boxes")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Boxes, not values."""
        return f"Boxes({tuple(self.shape)}, {[chunk.box for chunk in self._chunks]})"

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=listed, properties=properties, size=self.size()),
            )
            for chunk, listed in zip(self._chunks, self.__create_chunk_list__(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in self._chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(chunk.local for chunk in self._chunks if chunk.offsets == tuple(index.offset or ()))


def boxed(value: Any, name: str) -> Any:
    """The value, or its boxes when it is a DTensor of which torch would name one box and that one wrongly."""
    if isinstance(value, DTensor) and is_interleaving(value):
        return Boxes(value.shape, value.dtype, shard_of(value, name).chunks)
    return value


class CkptdSavePlanner(DefaultSavePlanner):
    """Save planner for DTensors with strided placements: `dcp.save(..., planner=CkptdSavePlanner())`, with any writer.

    DCP describes the shard of such a tensor as a single box at its first row. Where the shard is several runs of rows,
    DCP then refuses the plan ("Failed to validate global plan"). This planner makes each run an item of its own; it is
    a DefaultSavePlanner otherwise.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """As DefaultSavePlanner's. Raises UsageError for a DTensor whose placements do not give its local tensor.

        DCP looks for the parameters by name, and warns where they are not.
        """
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict = {name: boxed(value, repr(name)) for name, value in self.state_dict.items()}
