"""A trainer's own files, for Client.save_files: each is staged as the bytes that the trainer would have written.

``bytes`` are a file as they are. TorchFile is what torch.save writes, SafetensorsFile what safetensors does: their
tensors are copied once, straight to where they belong in the file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from ckptd.shared.base.errors import UsageError
from ckptd.shared.base.wording import shown
from ckptd.shared.format.layout import is_text
from ckptd_client._image.file_bytes import Copy, FileBytes
from ckptd_client._image.torch_file import torch_file
from ckptd_client._state.tensors import CODE_OF

_ALIGN = 8  # of a safetensors header


@dataclass(frozen=True, slots=True)
class TorchFile:
    """The file that `torch.save(value, path)` would write, for `torch.load`. Pickled when it is saved.

    Attributes:
        value: Anything that torch.save takes. Tensors are copied once.
    """

    value: Any

    def lay_out(self) -> FileBytes:
        """The file's bytes. Raises what pickle raises."""
        return torch_file(self.value)


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """The file that `safetensors.torch.save_file(tensors, path, metadata)` would write, byte for byte.

    Attributes:
        tensors: Name and dense tensor. Each is copied once.
        metadata: Texts for the header.
    """

    tensors: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str] | None = None

    def lay_out(self) -> FileBytes:
        """The file's bytes. Raises UsageError for a tensor that the format has no code for."""
        items = [(name, self._plain(name, tensor)) for name, tensor in self.tensors.items()]
        items.sort(key=lambda item: (-_ORDER.index(CODE_OF[item[1].dtype]), item[0]))
        header: dict[str, Any] = {"__metadata__": dict(self.metadata)} if self.metadata is not None else {}
        for said in (*self.tensors, *(part for item in (self.metadata or {}).items() for part in item)):
            if not is_text(said):
                raise UsageError(f"{shown(said)} is not valid Unicode, and no name in safetensors", hint="change it")
        at = 0
        for name, tensor in items:
            stop = at + tensor.nbytes
            code = CODE_OF[tensor.dtype]
            header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [at, stop]}
            at = stop
        text = msgspec.json.encode(header)
        nbytes = -(-len(text) // _ALIGN) * _ALIGN
        flats = (Copy(tensor.reshape(-1).view(torch.uint8)) for _, tensor in items)
        return FileBytes(nbytes.to_bytes(8, "little") + text.ljust(nbytes), *flats)

    @staticmethod
    def _plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            raise UsageError(f"{name!r} is no dense tensor, and safetensors has none else", hint="leave it out")
        if CODE_OF.get(tensor.dtype) not in _ORDER:
            raise UsageError(f"{name!r} is {tensor.dtype}, which safetensors has no code for", hint="leave it out")
        return tensor.detach().resolve_conj().resolve_neg().contiguous()


# By falling size of an element, and equal ones as safetensors has them.
_ORDER = (
    "BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I16", "U16", "F16", "BF16",
    "I32", "U32", "F32", "C64", "F64", "I64", "U64",
)  # fmt: skip

TrainerFile = TorchFile | SafetensorsFile | FileBytes | bytes


def lay_out(file: TrainerFile) -> FileBytes:
    """Any of them as bytes to be put together. Raises UsageError for anything else."""
    if isinstance(file, FileBytes):
        return file
    if isinstance(file, (TorchFile, SafetensorsFile)):
        return file.lay_out()
    if not isinstance(file, (bytes, bytearray, memoryview)):
        raise UsageError(f"a file cannot be made of {type(file).__name__}", hint="bytes, TorchFile or SafetensorsFile")
    return FileBytes(bytes(file))
