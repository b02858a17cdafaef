"""The content of a file to be written: known bytes, and tensors to be copied between them."""

from typing import NamedTuple, Self

import torch


class Copy(NamedTuple):
    """The bytes of a tensor: one dimension of uint8, on any device."""

    flat: torch.Tensor


class FileBytes:
    """A file's content, in order. Refers to the tensors that were added, without a copy."""

    def __init__(self, *pieces: bytes | Copy) -> None:
        self.nbytes = 0
        self.known: list[tuple[int, bytes]] = []  # (offset, bytes)
        self.copies: list[tuple[int, torch.Tensor]] = []  # (offset, one dimension of uint8)
        for piece in pieces:
            self.add(piece)

    def add(self, piece: bytes | Copy) -> None:
        """Appends a piece."""
        if isinstance(piece, Copy):
            if piece.flat.numel():
                self.copies.append((self.nbytes, piece.flat))
            self.nbytes += piece.flat.numel()
            return
        if piece:
            self.known.append((self.nbytes, piece))
        self.nbytes += len(piece)

    def own(self) -> Self:
        """Replaces the tensors by copies in the host's memory, so that they may change. Returns self."""
        self.copies = [(offset, flat.to("cpu", copy=True)) for offset, flat in self.copies]
        return self
