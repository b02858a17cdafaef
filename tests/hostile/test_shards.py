"""Shards that are missing, of an older save, swapped, or flipped in one bit: refused, by the reader and by verify."""

import os
import shutil

import pytest
import torch

import ckptd_client
from ckptd.checkpoint.verify import verify_path
from ckptd.shared.base.errors import CkptdError
from ckptd.shared.base.ids import SaveId
from ckptd_client._load.rounds import read_checkpoint
from ckptd_client._local.rank import Group
from tests.checkpoints import write_checkpoint
from tests.cluster import Node
from tests.hostile import forge
from tests.runs import RUN

NAMES = ["r00000-p00.safetensors", "r00001-p00.safetensors"]
OLD, NEW = SaveId(1, 1, 10, RUN), SaveId(1, 2, 20, RUN)


def state_of(rank, seed):
    torch.manual_seed(10 * seed + rank)
    return {"w": torch.randn(50, 4), "rank": rank, "seed": seed}


@pytest.fixture
def finals(tmp_path):
    """The checkpoints of two saves of two ranks."""
    return [
        write_checkpoint(tmp_path / "store", [state_of(rank, save.step) for rank in range(2)], save=save)
        for save in (OLD, NEW)
    ]


def missing(_old, new):
    os.unlink(new / NAMES[1])
    return f"{NAMES[1]}: "


def stale(old, new):
    shutil.copy(old / NAMES[1], new / NAMES[1])
    return f"{NAMES[1]}: block 0 "


def stale_and_signed(old, new):
    """The older image with a record that says it is the newer one's: its header still says whose it is."""
    forge.put_image(new, (old / NAMES[1]).read_bytes(), 1)
    return f"{NAMES[1]}: header: of save"


def swapped(_old, new):
    os.rename(new / NAMES[0], new / "x")
    os.rename(new / NAMES[1], new / NAMES[0])
    os.rename(new / "x", new / NAMES[1])
    return f"{NAMES[1]}: block 0 "


def swapped_and_signed(_old, new):
    images = [(new / name).read_bytes() for name in NAMES]
    for rank in range(2):
        forge.put_image(new, images[1 - rank], rank)
    return f"{NAMES[1]}: header: of save"


def swapped_records(_old, new):
    """Each rank's record with the other's name."""
    for rank in range(2):
        forge.edit_record(new, rank, lambda raw: raw.update(name=NAMES[1 - raw["rank"]]))
    return "vote: r0000"


def flipped(_old, new):
    data = bytearray((new / NAMES[1]).read_bytes())
    data[-100] ^= 4
    (new / NAMES[1]).write_bytes(data)
    return f"{NAMES[1]}: block 0 "


HARM = [missing, stale, stale_and_signed, swapped, swapped_and_signed, swapped_records, flipped]


def load(final, rank, ranks):
    state = {"w": torch.zeros(50, 4), "rank": -1, "seed": -1}
    read_checkpoint(str(final), state, group=Group(rank, ranks, "test"))[0].finish(state)
    return state


@pytest.mark.parametrize("harm", HARM)
def test_verify_names_it(finals, harm):
    assert all(verify_path(str(final)).ok for final in finals)
    word = harm(*finals)
    assert word in "\n".join(map(str, verify_path(str(finals[1])).problems))
    assert verify_path(str(finals[0])).ok


@pytest.mark.parametrize("harm", [h for h in HARM if not h.__name__.endswith("signed")])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_reader_names_it(finals, harm, ranks):
    """On as many ranks, and on another number, where everything is read range by range."""
    assert load(finals[1], 1, ranks)["seed"] == 20
    word = harm(*finals)
    told = []
    for rank in range(ranks):
        try:
            load(finals[1], rank, ranks)
        except CkptdError as error:
            told.append(error.message)
    assert word.split(":")[0].removesuffix("1-p00.safetensors") in "\n".join(told)


def test_load_passes_over_it_and_says_so(tmp_path, monkeypatch):
    """Through the daemon: the older checkpoint, with a note; of that step alone, an error."""
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    store = tmp_path / "store"
    write_checkpoint(store, [state_of(0, 10)], save=OLD)
    newest = write_checkpoint(store, [state_of(0, 20)], save=NEW)
    (newest / NAMES[0]).write_bytes((store / "demo" / OLD.dirname / NAMES[0]).read_bytes())
    with Node(str(store)) as node:
        node.start()
        state = {"w": torch.zeros(50, 4), "rank": -1, "seed": -1}
        with ckptd_client.connect("demo", store=node.store, arena=node.arena, start=False) as client:
            restored = client.load(state)
            assert (restored.step, state["seed"]) == (10, 10)
            assert f"{NAMES[0]}: block 0 " in "\n".join(restored.notes)
            with pytest.raises(ckptd_client.RestoreError, match=NAMES[0]):
                client.load(state, step=20)
