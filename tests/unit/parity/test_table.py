"""A digest table that is made on the way is the one that is made at the end, however the bytes come."""

import random

import pytest

from ckptd.parity import table as module
from ckptd.parity.table import Table
from ckptd.protocol.digest import BLOCK_NBYTES, blocks, digest

NBYTES = 2 * BLOCK_NBYTES + 12_345
DATA = memoryview(random.Random(3).randbytes(NBYTES + 5000))  # the tail of a slot lies beyond
WANTED = b"".join(digest(DATA[start:stop]) for start, stop in blocks(NBYTES))


@pytest.fixture
def looked_at(monkeypatch):
    """Lengths of the blocks that were digested only at the end."""
    found = []

    def counted(part):
        found.append(len(part))
        return digest(part)

    monkeypatch.setattr(module, "digest", counted)
    return found


def told(cuts):
    table = Table(NBYTES)
    for start, stop in cuts:
        table.take(start, DATA[start:stop])
    return table


def test_bytes_in_order_are_digested_once(looked_at):
    cuts = [(at, min(at + 3_000_001, len(DATA))) for at in range(0, len(DATA), 3_000_001)]
    assert told(cuts).all(DATA) == WANTED
    assert not looked_at


def test_blocks_may_come_in_any_order(looked_at):
    edges = [0, BLOCK_NBYTES, 2 * BLOCK_NBYTES, NBYTES]
    assert told([(edges[i], edges[i + 1]) for i in (2, 0, 1)]).all(DATA) == WANTED
    assert not looked_at


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
def test_what_did_not_come_in_order_is_digested_at_the_end(looked_at, cuts):
    assert told(cuts).all(DATA) == WANTED
    assert looked_at == [stop - start for start, stop in blocks(NBYTES)]


def test_nothing_has_an_empty_table():
    table = Table(0)
    table.take(0, DATA[:10])
    assert table.all(DATA[:0]) == b""
