"""Plain leaves for torch's own readers: a torch.save archive for each leaf, written again only if the leaf changed."""

import io
import logging

import torch

from ckptd.shared.format.layout import Leaf
from ckptd.shared.format.manifest import StockObjects, encode_objects
from ckptd.shared.format.slot import MAX_OBJECTS_NBYTES
from ckptd_client._state.leaves import decode_leaf
from ckptd_client._state.pickle import CODEC as PICKLE

log = logging.getLogger("ckptd_client")


class StockLeaves:
    """Encodes the content of `objects.pt` at each save, for rank 0."""

    def __init__(self) -> None:
        self._archives: dict[str, tuple[Leaf, bytes]] = {}
        self._encoded = b""
        self._refused: set[str] = set()

    def encode(self, leaves: dict[str, Leaf]) -> bytes:
        """The encoded archives of the leaves, with their offsets; empty if there are none or they are too large."""
        before = self._archives
        self._archives = {name: self._archive(name, leaf) for name, leaf in leaves.items()}
        if self._archives != before:
            self._encoded = self._join()
        return self._encoded

    def _archive(self, name: str, leaf: Leaf) -> tuple[Leaf, bytes]:
        known = self._archives.get(name)
        return known if known is not None and known[0] == leaf else (leaf, self._save(name, leaf))

    def _save(self, name: str, leaf: Leaf) -> bytes:
        """The archive of the value that load would return, so that all readers agree; empty if pickle refuses it."""
        if leaf.codec == PICKLE:
            return leaf.data
        buffer = io.BytesIO()
        try:
            torch.save(decode_leaf(leaf, name), buffer)
        except Exception as error:  # noqa: BLE001 - a user's class may raise anything; ckptd does not need this archive
            if name not in self._refused:
                self._refused.add(name)
                log.warning("ckptd: torch's own readers will not find %s, which pickle refuses: %s", name, error)
            return b""
        return buffer.getvalue()

    def _join(self) -> bytes:
        index: dict[str, tuple[int, int]] = {}
        start = 0
        for name, (_, archive) in self._archives.items():
            if archive:
                index[name] = (start, len(archive))
                start += len(archive)
        if not index:
            return b""
        encoded = encode_objects(StockObjects(b"".join(archive for _, archive in self._archives.values()), index))
        return encoded if len(encoded) <= MAX_OBJECTS_NBYTES else b""
