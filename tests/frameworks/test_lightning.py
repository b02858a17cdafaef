"""Lightning on the CPU, one rank and two: killed and resumed, with its own callbacks and its own loader."""

import re

import pytest
import torch

from tests.cluster import Node
from tests.frameworks.launch import on_ranks

pytestmark = [pytest.mark.frameworks("lightning"), pytest.mark.timeout(400)]

SCRIPT = "lightning_ranks.py"


def said(text, words):
    return sorted(re.findall(rf"{words}.*?([0-9a-f]{{32}})", text))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_training_goes_on_from_memory_and_then_by_stock_means(ranks, tmp_path):
    out = tmp_path / "out"
    with Node(str(tmp_path)) as node:
        node.start("--drain-bandwidth", "20K")
        undisturbed = on_ranks(node, ranks, SCRIPT, "reference", str(tmp_path / "reference"))
        trained = on_ranks(node, ranks, SCRIPT, "train", str(out), killed=True)
        assert not (out / "last.ckpt").exists(), "what is not drained is not there"
        node.kill()
        node.start()  # from now on the store is fast
        resumed = on_ranks(node, ranks, SCRIPT, "resume", str(out))
        assert resumed.count("resumes from epoch=3.ckpt") == ranks, resumed
        assert said(resumed, "begins at epoch 4, ") == said(trained, "saved "), resumed
        assert said(resumed, "ended, ") == said(undisturbed, "ended, "), resumed
        names = {path.name for path in out.iterdir()} - {"epoch=3.ckpt"}  # Lightning keeps what it resumed from
        assert names == {path.name for path in (tmp_path / "reference").iterdir()}, "save_top_k, as without ckptd"
        for name in names:
            ours = torch.load(out / name, weights_only=False)
            theirs = torch.load(tmp_path / "reference" / name, weights_only=False)
            assert ours["global_step"] == theirs["global_step"], name
            assert all(torch.equal(ours["state_dict"][key], value) for key, value in theirs["state_dict"].items()), name
        stock = on_ranks(node, ranks, SCRIPT, "stock", str(out), "last.ckpt")
        assert said(stock, "ended, ") == said(undisturbed, "ended, "), stock
