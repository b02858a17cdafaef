"""A file that is still to be put together: bytes that are known, and tensors that are to be copied between them."""

from typing import NamedTuple, Self

import torch


class Copy(NamedTuple):
    """Bytes that lie in a tensor: one dimension of uint8, on any device."""

    flat: torch.Tensor


class FileBytes:
    """A file's content, in order. Refers to the tensors that were added, and copies none."""

    def __init__(self, *pieces: bytes | Copy) -> None:
        self.nbytes = 0
        self.known: list[tuple[int, bytes]] = []  # (offset, bytes)
        self.copies: list[tuple[int, torch.Tensor]] = []  # (offset, one dimension of uint8)
        for piece in pieces:
            self.add(piece)

    def add(self, piece: bytes | Copy) -> None:
        """Puts it at the end."""
        if isinstance(piece, Copy):
            if piece.flat.numel():
                self.copies.append((self.nbytes, piece.flat))
            self.nbytes += piece.flat.numel()
            return
        if piece:
            self.known.append((self.nbytes, piece))
        self.nbytes += len(piece)

    def own(self) -> Self:
        """Itself, of copies in the host's memory: the tensors may change from now on."""
        self.copies = [(offset, flat.to("cpu", copy=True)) for offset, flat in self.copies]
        return self
