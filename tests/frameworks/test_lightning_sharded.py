"""Lightning's FSDPStrategy, and ModelParallelStrategy with FSDP2, on two CPU ranks: killed, resumed, read by stock."""

import re

import pytest

from tests.cluster import Node, wait_for
from tests.frameworks.launch import on_ranks

pytestmark = [pytest.mark.frameworks("lightning"), pytest.mark.timeout(400)]

SCRIPT = "lightning_sharded_ranks.py"
HELD = ("--drain-bandwidth", "1")  # byte a second: nothing is drained


def said(text, words):
    return sorted(re.findall(rf"{words}.*?([0-9a-f]{{32}})", text))


@pytest.fixture(scope="module", params=["fsdp1", "fsdp2"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def reference(kind, tmp_path_factory):
    """An undisturbed training with Lightning's own strategy: its directory, and what its ranks say."""
    folder = tmp_path_factory.mktemp("reference")
    with Node(str(folder)) as node:
        return folder / "out", on_ranks(node, 2, SCRIPT, kind, "reference", str(folder / "out"))


def shown(folder):
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def test_a_killed_training_goes_on_from_memory_and_then_by_stock_means(kind, reference, tmp_path):
    out = tmp_path / "out"
    with Node(str(tmp_path)) as node:
        node.start(*HELD)
        trained = on_ranks(node, 2, SCRIPT, kind, "train", str(out), "staged", killed=True)
        assert shown(out) == set(), "what is not drained is not there"
        node.kill()
        node.start()  # from now on the store is fast
        resumed = on_ranks(node, 2, SCRIPT, kind, "resume", str(out))
        assert resumed.count("begins at epoch 4 from arena") == 2, resumed
        assert said(resumed, "begins at epoch 4 ") == said(trained, "saved "), resumed
        assert said(resumed, "ended, ") == said(reference[1], "ended, "), resumed
        assert shown(out) - {"epoch=3.ckpt"} == shown(reference[0]), "save_top_k, as without ckptd"
        stock = on_ranks(node, 2, SCRIPT, kind, "stock", str(out), "epoch=4.ckpt")
        assert said(stock, "ended, ") == said(reference[1], "ended, "), stock


def test_what_was_drained_appears_though_its_trainer_has_ended(kind, reference, tmp_path):
    out = tmp_path / "out"
    with Node(str(tmp_path)) as node:
        node.start()
        trained = on_ranks(node, 2, SCRIPT, kind, "train", str(out), "durable", killed=True)
        assert wait_for((out / "epoch=3.ckpt").exists)
        node.kill()
        node.lose_arena()
        node.start()
        resumed = on_ranks(node, 2, SCRIPT, kind, "resume", str(out))
        assert resumed.count("begins at epoch 4 from pfs") == 2, resumed
        assert said(resumed, "begins at epoch 4 ") == said(trained, "saved "), resumed
        assert said(resumed, "ended, ") == said(reference[1], "ended, "), resumed
