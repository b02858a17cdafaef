"""The programs in the documents, as they stand there: run, and run again."""

import os
import re
import sys

import pytest
import torch

from ckptd.shared.format.integrity import XXH3
from ckptd.shared.protocol.journal import Steps
from ckptd.shared.stores.kinds import open_files
from ckptd.store.journal import read_journal
from tests.cluster import ROOT, wait_for
from tests.interop.launch import torchrun

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def node(fresh_node):
    return fresh_node


def program(document, heading, node):
    """The first Python block after the heading, with the node's store and a smaller model. Its path."""
    with open(os.path.join(ROOT, document), encoding="utf-8") as file:
        text = file.read().partition(f"\n## {heading}\n")[2]
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    assert code.count('store="/tmp/ckpt"') == 1
    path = os.path.join(node.temporary, "program.py")
    with open(path, "w", encoding="utf-8") as file:
        code = re.sub(r'"/tmp/ckpt(?=["/])', f'"{node.store}', code)
        file.write(code.replace("time.sleep(0.2)", "pass").replace("2048", "256"))
    return path


def steps(node, job):
    return sorted(name for name in os.listdir(os.path.join(node.store, job)) if name.startswith("step-"))


def test_the_dcp_example_goes_on_where_it_ended(node):
    path = program("docs/dcp.md", "A complete example", node)
    assert "starting at step 0\n" in torchrun(node, 2, path)
    assert [name.partition(".")[0] for name in steps(node, "dcp-example")][-1] == "step-000000029"
    assert "starting at step 30\n" in torchrun(node, 2, path)
    assert [name.partition(".")[0] for name in steps(node, "dcp-example")][-1] == "step-000000059"


def test_the_trainer_of_the_example_goes_on_where_it_ended(node):
    path = program("docs/integrations.md", "A complete example", node)
    for first in (0, 30):
        said = node.complete(sys.executable, path, timeout_s=100, PYTHONWARNINGS="ignore")
        assert f"starting at step {first}\n" in said
        assert os.path.exists(os.path.join(node.store, "my-run", f"step-{first + 30}", "model.pt"))


def test_the_files_of_the_example_come_back_and_torch_reads_them_where_they_were_to_appear(node):
    path = program("docs/files.md", "A complete example", node)
    for first, tier in ((0, "nothing"), (30, "(arena|pfs)")):
        printed = node.complete(sys.executable, path, timeout_s=100)
        assert re.search(rf"^starting at step {first} from {tier}$", printed, re.MULTILINE)
        folder = os.path.join(node.store, "my-run", f"step-{first + 29}")
        wait_for(lambda folder=folder: os.path.exists(os.path.join(folder, "model.pt")))
        assert torch.load(os.path.join(folder, "model.pt"))["weight"].shape == (256, 256)


def test_the_first_save_of_the_readme_goes_on_where_it_ended_and_each_reader_reads_it(node):
    path = program("README.md", "A first save", node)
    for first in (0, 100):
        assert f"starting at step {first} " in node.complete(sys.executable, path, timeout_s=100)
    path = program("docs/readers.md", "Five ways", node)
    assert "True" in node.complete(sys.executable, path, timeout_s=100, PYTHONWARNINGS="ignore").splitlines()


def test_the_gather_of_the_document_gives_rank_0_whole_tensors(node):
    said = torchrun(node, 2, program("docs/client.md", "Whole weights", node))
    assert said.count("weight (64, 64)") == said.count("bias (64,)") == 1


def test_the_last_step_of_the_loop_is_on_record(node):
    path = program("docs/history.md", "Where the time went", node)
    node.complete(sys.executable, path, timeout_s=100)

    def told():
        found = read_journal(open_files(f"{node.store}/timed", XXH3)).entries
        return [entry.step for entry in found if isinstance(entry, Steps)]

    wait_for(lambda: told() == [99])


def test_the_loop_that_asks_for_preemption_goes_on_where_it_ended(node):
    path = program("docs/operations.md", "Before it is killed", node)
    for last in (99, 199):
        assert f"ended at step {last}\n" in node.complete(sys.executable, path, timeout_s=100)
