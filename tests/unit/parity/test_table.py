"""A digest table that is made on the way is the one that is made at the end, however the bytes come."""

import numpy as np
import pytest

from ckptd.parity.table import Table
from ckptd.shared.format.digest import BLOCK_NBYTES, blocks, digest
from ckptd.shared.format.integrity import XXH3, Integrity, Keyed, Purpose

NBYTES = 2 * BLOCK_NBYTES + 12_345
DATA = memoryview(np.random.default_rng(3).bytes(NBYTES + 5000))  # the tail of a slot lies beyond
WANTED = b"".join(digest(DATA[start:stop]) for start, stop in blocks(NBYTES))


class Counted(Integrity):
    """Keeps the lengths of the blocks that were digested only at the end."""

    def __init__(self):
        self.lengths = []

    def digest(self, data, purpose=Purpose.BLOCK):
        self.lengths.append(len(data))
        return super().digest(data, purpose)


def told(cuts, counted=XXH3):
    table = Table(NBYTES, counted)
    for start, stop in cuts:
        table.take(start, DATA[start:stop])
    return table


def test_bytes_in_order_are_digested_once():
    cuts = [(at, min(at + 3_000_001, len(DATA))) for at in range(0, len(DATA), 3_000_001)]
    counted = Counted()
    assert told(cuts, counted).all(DATA) == WANTED
    assert not counted.lengths


def test_blocks_may_come_in_any_order():
    edges = [0, BLOCK_NBYTES, 2 * BLOCK_NBYTES, NBYTES]
    counted = Counted()
    assert told([(edges[i], edges[i + 1]) for i in (2, 0, 1)], counted).all(DATA) == WANTED
    assert not counted.lengths


@pytest.mark.parametrize(
    "cuts",
    [
        [],
        [(0, 100)],
        [(100, BLOCK_NBYTES)],
        [(0, 100), (200, BLOCK_NBYTES)],
        [(0, 200), (100, BLOCK_NBYTES)],
        [(BLOCK_NBYTES // 2, BLOCK_NBYTES), (0, BLOCK_NBYTES // 2)],
        [(NBYTES, NBYTES + 5000)],
    ],
    ids=["nothing", "beginning", "end", "gap", "overlap", "backwards", "beyond"],
)
def test_what_did_not_come_in_order_is_digested_at_the_end(cuts):
    counted = Counted()
    assert told(cuts, counted).all(DATA) == WANTED
    assert counted.lengths == [stop - start for start, stop in blocks(NBYTES)]


def test_nothing_has_an_empty_table():
    table = Table(0)
    table.take(0, DATA[:10])
    assert table.all(DATA[:0]) == b""


def test_with_a_key_it_is_the_keyed_one():
    keyed = Keyed(bytes(32))
    found = told([(0, BLOCK_NBYTES), (BLOCK_NBYTES, BLOCK_NBYTES + 7)], keyed).all(DATA)
    assert found == b"".join(keyed.digest(DATA[start:stop]) for start, stop in blocks(NBYTES))
