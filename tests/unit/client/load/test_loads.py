"""What a rank does with a checkpoint that it could open and the others could not."""

from types import SimpleNamespace

from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.integrity import XXH3
from ckptd.shared.protocol.messages import LoadFrom, Tier
from ckptd.shared.stores.kinds import open_files
from ckptd_client._load import rounds
from ckptd_client._load.checkpoint import Checkpoint
from tests.runs import RUN

SAVE = SaveId(1, 1, 7, RUN)


def opened(order, closed):
    class Noted(Checkpoint):
        def close(self):
            closed.append(self.tier)

    return Noted({}, save=order.save, tier=order.tier, stored=open_files("", XXH3), opener={}.__getitem__)


def test_what_the_ranks_do_not_agree_on_is_closed():
    orders = [
        LoadFrom(reply_to=1, incarnation=2, run=RUN, save=SAVE, tier=tier, slot="", path="", notes=[], agreed=agreed)
        for tier, agreed in [(Tier.ARENA, False), (Tier.PFS, False), (Tier.PFS, True)]
    ]
    link = SimpleNamespace(
        ask=lambda _make, _deadline: orders.pop(0),
        job=JobKey("/store", "job"),
        waits_for="",
        group=SimpleNamespace(rank=0, world_size=1),
    )
    closed = []
    order, found = rounds._run(link, None, lambda order: opened(order, closed))
    assert (order.agreed, found.tier, closed) == (True, Tier.PFS, [Tier.ARENA])
