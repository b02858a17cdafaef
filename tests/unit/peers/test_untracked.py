"""What a coordinator keeps of each node, and of each packet, is not looked through by garbage collections.

At 1,000 nodes of 8 ranks one that does takes the loop a tenth of a second. None of it can be part of a cycle.
"""

import gc

import pytest

from ckptd.peers.packets import Letter, Packet, decode_body, encode_body
from ckptd.peers.packets import Message as Carried
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.protocol import node_messages as m
from ckptd.shared.protocol.topology import Peer
from tests.runs import RUN

SAVE = SaveId(1, 2, 3, RUN)
PACKET = Packet(1, 2, 3)


@pytest.mark.parametrize(
    "item",
    [
        SAVE, PACKET, JobKey("/store", "job"), Peer("n", "arena", "tcp://h:1", "k" * 40), Letter("n", 1, PACKET),
        m.Living(3, "s", 4, "h"), m.Arrival(3, 8), m.HeldSegment(SAVE, 3, 8, 1 << 30), m.StagedSegment(3, 1 << 30),
        m.SaveStaged(job=JobKey("/store", "job"), node="n", save=SAVE), decode_body(encode_body(Carried(b"x"))),
    ],
    ids=lambda item: type(item).__name__,
)  # fmt: skip
def test_it_is_not_tracked(item):
    assert not gc.is_tracked(item)
