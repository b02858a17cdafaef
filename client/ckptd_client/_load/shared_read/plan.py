"""From which node each node has each block, when nodes of a tree read a checkpoint on the store together. Pure.

A column has, for each block of the checkpoint, the number of the node of some subtree that has it first, NONE where no
node there wants it. A node's own column has its own number. The parent of several subtrees joins their columns: where
several want a block, one of these nodes has it first, and the others get it from each other in a tree of SENDS. The
column of the result goes up; the root's says which nodes read the store: each block once. All pairs of a sending and a
receiving node are edges. What a node sends of a block is bounded by SENDS and the levels of the tree, and all of what
it sends is about what it wants, whatever the size of the job: as many edges end at a node as it has blocks.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple, Self

import msgspec
import numpy as np
import numpy.typing as npt

from ckptd.shared.protocol.read_tree import FANOUT, MAX_READERS, ExchangeAddress
from ckptd_client._load.shared_read.found import Found

Ints = npt.NDArray[np.int32]
SENDS: Final = 4  # nodes to which a node sends a block, for each level of the tree at which it has it first
NONE: Final = -1
MAX_BLOCKS: Final = 1 << 24  # of a checkpoint that nodes read together
_LEVELS: Final = 4  # of a tree of MAX_READERS
# For one block, and all edges that the nodes above make: the subtree gets it once, and sends it at each level.
_MAX_EDGES: Final = 1 + SENDS * _LEVELS
_ADDRESS_NBYTES: Final = 320  # of a node's number and address, packed
_Number = Annotated[int, msgspec.Meta(ge=0, lt=MAX_READERS)]


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    """What goes between nodes: numbers of 32 bits, compressed, and addresses of nodes that these name."""

    numbers: bytes
    addresses: dict[_Number, ExchangeAddress]
    found: Annotated[list[Found], msgspec.Meta(max_length=2)] = []


_decoder = msgspec.msgpack.Decoder(_Packed)


class Edges(NamedTuple):
    """Entry i: node ``source[i]`` sends block ``block[i]`` to node ``target[i]``."""

    block: Ints
    source: Ints
    target: Ints

    @classmethod
    def none(cls) -> Self:
        """No edge."""
        empty = np.empty(0, np.int32)
        return cls(empty, empty, empty)

    @classmethod
    def of(cls, parts: Sequence["Edges"]) -> Self:
        """All of these."""
        return cls(*(np.concatenate(column) for column in zip(*parts, strict=True))) if parts else cls.none()

    def touching(self, nodes: range) -> "Edges":
        """Those from or to one of consecutive nodes."""
        inside = [(nodes.start <= ends) & (ends < nodes.stop) for ends in (self.source, self.target)]
        return Edges(*(column[inside[0] | inside[1]] for column in self))

    def sources_to(self, nodes: range) -> list[int]:
        """The nodes that send to one of consecutive nodes."""
        inside = (nodes.start <= self.target) & (self.target < nodes.stop)
        return [int(node) for node in np.unique(self.source[inside])]

    def by_source(self, target: int) -> dict[int, list[int]]:
        """The blocks that a node gets, in ascending order, by the node that sends them."""
        return _grouped(self.source[self.target == target], self.block[self.target == target])

    def by_target(self, source: int) -> dict[int, list[int]]:
        """The blocks that a node sends, in ascending order, by the node that gets them."""
        return _grouped(self.target[self.source == source], self.block[self.source == source])


def _grouped(keys: Ints, blocks: Ints) -> dict[int, list[int]]:
    return {int(key): sorted(blocks[keys == key].tolist()) for key in np.unique(keys)}


def column_of(node: int, wanted: bytes, total: int) -> Ints:
    """The column of one node. wanted: bit b of byte b // 8 stands for block b, of total."""
    bits = np.unpackbits(np.frombuffer(wanted, np.uint8), count=total, bitorder="little")
    return np.where(bits.astype(bool), np.int32(node), np.int32(NONE))


def join(columns: Sequence[Ints], sizes: Ints) -> tuple[Ints, Edges]:
    """The column of all subtrees, at most FANOUT, and the edges between them. sizes: bytes of each block.

    Among blocks that the same subtrees want, each has equally many first, large blocks counted before small ones.
    """
    assert 0 < len(columns) <= FANOUT  # noqa: S101 - a level of the tree
    table = np.stack(columns)  # by subtree and block
    there = table != NONE
    count = there.sum(axis=0)
    joined = table.max(axis=0)
    shared = np.flatnonzero(count > 1)
    if not len(shared):
        return joined, Edges.none()
    table, there, count = table[:, shared], there[:, shared], count[shared]
    place = (np.cumsum(there, axis=0) - 1 - _turns(there, sizes[shared])) % count  # 0 has it first, in its block's tree
    nodes = np.full(table.shape, NONE, np.int32)  # by place and block
    of, at = np.nonzero(there)
    nodes[place[of, at], at] = table[of, at]
    joined[shared] = nodes[0]
    later = place[of, at] > 0
    of, at = of[later], at[later]
    source = nodes[(place[of, at] - 1) // SENDS, at]
    return joined, Edges(shared[at].astype(np.int32), source, table[of, at])


def _turns(there: npt.NDArray[np.bool_], sizes: Ints) -> npt.NDArray[np.int64]:
    """By how much the order of the subtrees of each block is turned."""
    masks = (there.astype(np.uint64) << np.arange(len(there), dtype=np.uint64)[:, None]).sum(axis=0, dtype=np.uint64)
    order = np.lexsort((-sizes, masks))
    ordered = masks[order]
    firsts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    turn = np.arange(len(order)) - np.repeat(firsts, np.diff(np.append(firsts, len(order))))
    turn = turn + (ordered % np.uint64(31)).astype(np.int64)  # not the same subtree first in each set of one block
    out = np.empty(len(order), np.int64)
    out[order] = turn
    return out


@dataclass(frozen=True, slots=True)
class Summary:
    """What a subtree reports to its parent: its column, and the addresses of the nodes in it."""

    column: Ints
    addresses: dict[int, ExchangeAddress]

    def pack(self) -> bytes:
        """Its bytes."""
        return _pack([self.column], {int(n): self.addresses[int(n)] for n in np.unique(self.column) if n != NONE})

    @classmethod
    def nothing(cls, total: int) -> Self:
        """That of a subtree with which no block is shared."""
        return cls(np.full(total, NONE, np.int32), {})

    @staticmethod
    def most_nbytes(total: int, nodes: int) -> int:
        """The most that pack gives for a subtree of so many nodes."""
        return _most_nbytes(total, nodes)

    @classmethod
    def unpack(cls, raw: bytes, total: int, nodes: range) -> Self:
        """That of the subtree of these nodes, with no other address. Raises ValueError, msgspec.ValidationError."""
        (column,), packed = _unpack(raw, 1, total)
        addresses = packed.addresses
        named = np.unique(column[column != NONE]).tolist()
        if len(column) != total or not set(named) <= addresses.keys() or not set(named) <= set(nodes):
            raise ValueError("a summary of other blocks or nodes")
        return cls(column, {node: addresses[node] for node in named})


@dataclass(frozen=True, slots=True)
class Orders:
    """What a parent sends to a subtree: the edges that touch it, and the addresses of nodes that send to it.

    found: as merged gives it, of all nodes; where two differ, there are no edges.
    """

    edges: Edges
    addresses: dict[int, ExchangeAddress]
    found: Sequence[Found] = ()

    def pack_for(self, nodes: range) -> bytes:
        """The bytes of what concerns these nodes."""
        edges = self.edges.touching(nodes)
        return _pack(edges, {node: self.addresses[node] for node in edges.sources_to(nodes)}, self.found)

    @staticmethod
    def most_nbytes(total: int, nodes: int) -> int:
        """The most that pack_for gives in a tree of so many nodes."""
        return _most_nbytes(3 * _MAX_EDGES * total, nodes)

    @classmethod
    def unpack(cls, raw: bytes, total: int, nodes: range) -> Self:
        """Those for the subtree of these nodes. Raises ValueError, msgspec.ValidationError."""
        columns, packed = _unpack(raw, 3, 3 * _MAX_EDGES * total)
        edges = Edges(*columns)
        if len(edges.block) and not 0 <= int(edges.block.min()) <= int(edges.block.max()) < total:
            raise ValueError("edges of other blocks")
        sources = edges.sources_to(nodes)
        if len(edges.touching(nodes).block) < len(edges.block) or not set(sources) <= packed.addresses.keys():
            raise ValueError("edges of other nodes, or of nodes without an address")
        return cls(edges, {node: packed.addresses[node] for node in sources}, packed.found)


def _pack(columns: Sequence[Ints], addresses: dict[int, ExchangeAddress], found: Sequence[Found] = ()) -> bytes:
    numbers = np.concatenate(columns).astype("<i4").tobytes()
    return msgspec.msgpack.encode(_Packed(zlib.compress(numbers, 1), addresses, [*found]))


def _most_nbytes(numbers: int, nodes: int) -> int:
    return (
        4 * numbers + 4 * numbers // 1000 + 128 + nodes * _ADDRESS_NBYTES
    )  # zlib adds less to what it cannot compress


def _unpack(raw: bytes, columns: int, most: int) -> tuple[list[Any], _Packed]:
    packed = _decoder.decode(raw)
    inflate = zlib.decompressobj()
    try:
        numbers = inflate.decompress(packed.numbers, 4 * most + 1)
    except zlib.error as error:
        raise ValueError(f"numbers of a plan that are none: {error}") from None
    if len(numbers) > 4 * most or len(numbers) % (4 * columns):
        raise ValueError("numbers of a plan of another length")
    return np.split(np.frombuffer(numbers, "<i4"), columns), packed
