"""A slot is read the same however its bytes came into it, and the load says how."""

import os

import pytest
import torch

from ckptd.shared.format.slot import SEALS_NBYTES, SlotState, decode_seals
from ckptd.shared.protocol.messages import LoadFrom, Tier
from ckptd_client._load import rounds
from tests.cluster import wait_for
from tests.runs import RUN


def digested(path):
    with open(path, "rb") as file:
        file.seek(-SEALS_NBYTES, os.SEEK_END)
        return decode_seals(file.read())[2].state is SlotState.DIGESTED


@pytest.mark.parametrize("tier", [Tier.ARENA, Tier.PEER, Tier.REBUILT])
def test_every_tier_but_the_store_reads_the_slot_it_is_pointed_to(tier, node, job, join):
    client = join()
    handle = client.save({"w": torch.arange(5.0)}, 3).wait("durable", 60)
    (path,) = wait_for(lambda: [p for p in node.slots() if f"/{job}-" in p and digested(p)])
    order = LoadFrom(reply_to=1, incarnation=9, run=RUN, save=handle.save_id, tier=tier, slot=os.path.basename(path))
    state = {"w": torch.zeros(5)}
    segment = rounds._read(client._link, state, order, strict=True)
    segment.fit.finish(state)
    assert (segment.save, segment.tier, state["w"].tolist()) == (handle.save_id, tier, [0.0, 1.0, 2.0, 3.0, 4.0])
    found = rounds._find(client._link, order, client._link.ask, whole=False)
    assert (found.tier, found.world_size) == (tier, 1)
    found.close()
