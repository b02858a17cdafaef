"""The programs in the documents about trainers, as they stand there: run, and run again."""

import os

import pytest

from tests.interop.launch import torchrun
from tests.interop.test_documents import program

pytestmark = [pytest.mark.timeout(240)]


def own(path, *places):
    """The program with directories of this test's."""
    with open(path, encoding="utf-8") as file:
        code = file.read()
    for place in places:
        assert f'"{place}"' in code
        code = code.replace(f'"{place}"', repr(os.path.join(os.path.dirname(path), os.path.basename(place))))
    with open(path, "w", encoding="utf-8") as file:
        file.write(code)
    return path


@pytest.mark.frameworks("deepspeed")
def test_the_deepspeed_example_goes_on_where_it_ended(node, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    path = own(program("docs/deepspeed.md", "A complete example", node), "/tmp/ckpt-deepspeed")
    assert "starting at step 0\n" in torchrun(node, 2, path)
    assert "starting at step 30\n" in torchrun(node, 2, path)


@pytest.mark.frameworks("lightning")
def test_the_lightning_example_leaves_its_best_two_and_the_last(node):
    path = own(program("docs/lightning.md", "A complete example", node), "/tmp/ckpt-lightning")
    for _ in range(2):
        said = torchrun(node, 2, path)
        assert said.count("at epoch 3\n") == 2, said
        names = os.listdir(os.path.join(os.path.dirname(path), "ckpt-lightning"))
        assert sorted(names) == ["epoch=1-step=8.ckpt", "epoch=2-step=12.ckpt", "last.ckpt"], said


@pytest.mark.frameworks("lightning")
def test_the_lightning_example_with_shards_leaves_its_best_two_and_the_last(node):
    path = own(program("docs/lightning.md", "FSDP2: a complete example", node), "/tmp/ckpt-lightning")
    with open(path, "a", encoding="utf-8") as file:
        file.write("import os, sys\nsys.stdout.flush()\nos._exit(0)\n")  # gloo's threads may abort an interpreter
    for _ in range(2):
        said = torchrun(node, 2, path)
        assert said.count("at epoch 3\n") == 2, said
        names = os.listdir(os.path.join(os.path.dirname(path), "ckpt-lightning"))
        assert sorted(names) == ["epoch=1-step=8.ckpt", "epoch=2-step=12.ckpt", "last.ckpt"], said
