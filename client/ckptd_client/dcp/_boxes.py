"""A tensor in boxes, as DCP's planners can take it: one write item and one chunk for each box."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
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
