"""What a rank does with a checkpoint that it could open and the others could not."""

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ckptd.shared.base.errors import DamagedError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format import packed_layout
from ckptd.shared.format.integrity import XXH3
from ckptd.shared.protocol.messages import LoadFrom, Tier
from ckptd.shared.stores.kinds import open_files
from ckptd_client._load import rounds
from ckptd_client._load.checkpoint import Checkpoint, open_directory
from ckptd_client._load.reader import Target
from ckptd_client._local.rank import Group
from tests.checkpoints import SAVE as SAVED
from tests.checkpoints import write_checkpoint
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


def test_what_ranks_have_alike_is_decoded_once_for_all_of_them(tmp_path, monkeypatch):
    """By each reader of all ranks: a plan of a large job is megabytes, and each of its ranks has it."""
    state = {"model": {f"layer{n}": torch.zeros(4) for n in range(3)}}
    path = str(write_checkpoint(tmp_path, [state] * 4))
    decoded, real = [], packed_layout._plan_in
    monkeypatch.setattr(packed_layout, "_plan_in", lambda data, where: decoded.append(data) or real(data, where))
    with contextlib.closing(open_directory(path)) as found:
        assert len({id(layout.paths) for layout in found.layouts.values()}) == 1
        assert len(decoded) == 1
        target = torch.empty(4)
        for rank, layout in found.layouts.items():
            entry = layout.tensors[0]
            found.read(rank, [Target(entry.data_offset, entry.nbytes, target.data_ptr())])
        assert len(decoded) == 1, "also where an image is opened"


def test_ranks_that_agree_on_a_checkpoint_look_at_all_of_its_records_together(tmp_path, votes_read):
    """So that one in which something is missing is passed over, though no rank knows yet what it will read."""
    path = write_checkpoint(tmp_path, [{"w": torch.zeros(4)}] * 7)
    votes_read.clear()
    order = LoadFrom(reply_to=1, incarnation=2, run=RUN, save=SAVED, tier=Tier.PFS, path=str(path))

    def find(rank, *, whole=False):
        link = SimpleNamespace(
            group=Group(rank, 3, "here"), settings=SimpleNamespace(integrity=XXH3), host="",
            slots=SimpleNamespace(directory=str(tmp_path)), job=JobKey(str(tmp_path), "demo"),
        )  # fmt: skip
        rounds._find(link, order, lambda *_: None, whole=whole).close()

    for rank in range(3):
        find(rank)
    assert sorted(votes_read) == [f"node{rank}" for rank in range(7)]
    next(Path(path).glob("r00004*")).unlink()
    find(0)
    find(1)
    with pytest.raises(DamagedError, match="r00004"):
        find(2)
    with pytest.raises(DamagedError, match="r00004"):
        find(0, whole=True)
