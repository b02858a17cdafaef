"""Nodes that hold real slots and serve them on loopback, for tests and measurements of parity and the bulk plane."""

import functools
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ckptd.arena.arena import Arena
from ckptd.parity.encode import encode
from ckptd.parity.files import Parities
from ckptd.parity.rebuild import Place, rebuild_segment
from ckptd.parity.served import open_served
from ckptd.parity.sources import Sources
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.bulk.client import Address
from ckptd.shared.bulk.server import BulkServer
from ckptd.shared.bulk.sockets import Cancel
from ckptd.shared.format.digest import block_count
from ckptd.shared.format.integrity import XXH3, Integrity, Purpose
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.format.slot import SEALS_NBYTES, Seal, SlotState, align_up
from ckptd.shared.protocol.parity_types import DataColumn, ParityChunk
from tests.runs import RUN

KEY = JobKey("/store", "job")
SAVE = SaveId(1, 1, 10, RUN)
EPOCH = 1
SECRET = bytes(range(32))


@functools.cache
def noise(seed: int | str, nbytes: int) -> bytes:
    """So many bytes without a pattern, made once: the same for the same seed."""
    return hashlib.shake_128(str(seed).encode()).digest(nbytes)


def stage(arena: Arena, rank: int, image: bytes | memoryview, save: SaveId = SAVE, tail: bytes = b"leaves") -> Seal:
    """A digested slot with that image, made as a rank and the daemon would. Its padding is not zeros."""
    layout = b"layout of rank %d" % rank
    seal = Seal(
        state=SlotState.SEALED, job=KEY, save=save, rank=rank, world_size=8, image_nbytes=len(image),
        layout_nbytes=len(layout), leaves_nbytes=len(tail),
        layout_digest=arena.integrity.digest(layout, Purpose.LAYOUT),
        leaves_digest=arena.integrity.digest(tail, Purpose.LEAVES),
    )  # fmt: skip
    capacity = align_up(seal.content_nbytes) + SEALS_NBYTES
    arena.reserve(rank, 1, capacity)
    name = arena.allocate(KEY, rank, capacity)
    view = arena.view(KEY, name)
    view[: len(image)] = image
    view[len(image) : seal.table_offset] = b"\xaa" * (seal.table_offset - len(image))
    view[seal.layout_offset : seal.content_nbytes] = layout + tail
    arena.seal(KEY, name, seal)
    table = arena.digests(KEY, name, save)
    assert table is not None
    assert len(table) == 16 * block_count(len(image))
    arena.seal_digests(KEY, name, table)
    return arena.seal_of(KEY, name)


def content(arena: Arena, rank: int, save: SaveId = SAVE) -> bytes:
    """Image and tail of a digested slot."""
    name = arena.slot_of(KEY, rank, save)
    assert name is not None
    seal, view = arena.seal_of(KEY, name), arena.view(KEY, name)
    return bytes(view[: seal.image_nbytes]) + bytes(view[seal.table_offset : seal.content_nbytes])


def _secret_of(link: str) -> bytes | None:
    """Of any link that is named like one: each process must have its own, or their counters would meet."""
    return SECRET if link.startswith("link") else None


@dataclass
class Node:
    """A daemon as far as parity is concerned: arena, parity files, and the server of both."""

    name: str
    arena: Arena
    parities: Parities
    server: BulkServer

    @classmethod
    def start(cls, name: str, directory: str, integrity: Integrity = XXH3) -> "Node":
        arena = Arena(os.path.join(directory, name), integrity=integrity)
        arena.open()
        server = BulkServer(lambda _link, ask, rank: open_served(arena, ask, rank), _secret_of, integrity=integrity)
        server.start()
        return cls(name, arena, Parities(arena), server)

    @property
    def address(self) -> Address:
        return Address(self.server.host, self.server.port, "link", SECRET)

    def stop(self) -> None:
        self.server.close()
        self.arena.close(remove=False)


@dataclass
class Set:
    """A redundancy set of nodes in one process."""

    nodes: list[Node]
    columns: tuple[DataColumn, ...] = ()
    down: set[str] = field(default_factory=set)
    relays: dict[str, Address] = field(default_factory=dict)
    timeout_s: float = 5.0

    def address_of(self, name: str) -> Address | None:
        node = next((node for node in self.nodes if node.name == name), None)
        if node is None or name in self.down:
            return None
        return self.relays.get(name, node.address)

    def sources(self, node: Node, cancel: Cancel | None = None) -> Sources:
        return Sources(node.name, node.arena, self.address_of, cancel or Cancel(), timeout_s=self.timeout_s)

    def stage(self, images: Sequence[Sequence[bytes]]) -> None:
        """Images of the ranks of each node; ranks count through."""
        ranks = itertools.count()
        self.columns = tuple(
            DataColumn(node.name, tuple(stage(node.arena, next(ranks), image) for image in own))
            for node, own in zip(self.nodes, images, strict=True)
        )

    def parity_chunk(self, index: int, scheme: Scheme, epoch: int = EPOCH) -> ParityChunk:
        return ParityChunk(SAVE, epoch, scheme, index, self.columns)

    def homes(self, lost: Sequence[int] = ()) -> Mapping[int, str]:
        return {s.rank: c.node for i, c in enumerate(self.columns) if i not in lost for s in c.seals}

    def parity_chunks(self, lost: Sequence[int] = ()) -> Mapping[int, str]:
        return {i: c.node for i, c in enumerate(self.columns) if i not in lost}

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()


def start_set(directory: str, members: int, integrity: Integrity = XXH3) -> Set:
    """Nodes n0, n1, ... with arenas below directory."""
    return Set([Node.start(f"n{i}", directory, integrity) for i in range(members)])


def flipped(image: bytes, at: int) -> bytes:
    """The image with one bit changed."""
    return image[:at] + bytes([image[at] ^ 4]) + image[at + 1 :]


# --- a node in a process of its own


def main() -> None:
    """``python -m tests.nodes DIRECTORY NAME RANK NBYTES``: stages, serves, and does what it is told on stdin."""
    directory, name, rank, nbytes = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    node = Node.start(name, directory)
    seal = stage(node.arena, rank, noise(rank, nbytes))
    print(json.dumps({"port": node.server.port, "seal": msgspec.json.encode(seal).decode()}), flush=True)

    def obey(said: dict[str, Any]) -> None:
        columns = tuple(DataColumn(n, (msgspec.json.decode(s, type=Seal),)) for n, s in said["columns"])
        ports = dict(said["ports"])
        own = Set([node], columns)
        link = f"link-{name}"
        sources = Sources(name, node.arena, lambda n: Address("127.0.0.1", ports[n], link, SECRET), Cancel())
        if said["do"] == "encode":
            encode(node.parities, KEY, own.parity_chunk(said["index"], Scheme.XOR), sources, lambda _: None)
        else:
            place = Place(node.arena, KEY, columns[said["lost"]].seals[0])
            lost = [said["lost"]]
            parity_chunk = own.parity_chunk(said["index"], Scheme.XOR)
            rebuild_segment(place, parity_chunk, own.homes(lost), own.parity_chunks(lost), sources, lambda _: None)

    for line in sys.stdin:
        obey(json.loads(line))
        print(json.dumps({}), flush=True)


if __name__ == "__main__":
    main()
