"""What DeepSpeed tests of its checkpoints itself, on two ranks, and what two ranks saved on one.

Of tests/unit/checkpoint in its repository, asked of DeepSpeed 0.19.8, these are not here:

- fp16, the fused Adam and Lamb, offload to DeepSpeed's own Adam: not on this CPU, or only with operators that are
  compiled; bf16, torch's Adam and offload to that stand for them. Compiled modules: they take minutes;
- a pipeline in bf16 without ZeRO, Adagrad without ZeRO in bf16 or under ZeRO-3, elastic states of torch's Adam under
  ZeRO-1 and 2, Adam's count of steps in ZeROCheckpoint: DeepSpeed alone fails to load them;
- MiCS and the sparse_gradients setting: gone in 0.19.8. hpZ: one engine in a process only. AutoEP: not tried;
- NVMe and FastPersist's engine: ckptd refuses the one and replaces the other;
- what asks nothing of a save: names of more than 99 ranks, reshape_3d, chmod, the arguments of zero_to_torch.
"""

import pathlib

import pytest

from tests.cluster import Node
from tests.frameworks import deepspeed_kinds as kinds
from tests.frameworks.hf_common import names_of
from tests.frameworks.launch import on_ranks

pytestmark = [pytest.mark.frameworks("deepspeed"), pytest.mark.timeout(400)]
SOURCE = pathlib.Path(__file__).with_name("deepspeed_cases.py")
FEWER = SOURCE.with_name("deepspeed_fewer_ranks.py")
KINDS = {
    "case": kinds.ANY,
    "partitioned_case": kinds.PARTITIONED,
    "flat_case": kinds.FLAT,
    "in_parts_case": kinds.IN_PARTS,
}


@pytest.fixture(scope="module")
def on_fewer(tmp_path_factory):
    """What one rank says of checkpoints that two have saved."""
    folder = tmp_path_factory.mktemp("fewer")
    with Node(str(folder)) as node:
        node.start()
        on_ranks(node, 2, FEWER.name, str(folder / "out"))
        yield on_ranks(node, 1, FEWER.name, str(folder / "out"))


@pytest.mark.parametrize("name", names_of(SOURCE, KINDS))
def test_a_case_of_deepspeeds_own_tests_of_zero(cases, name):
    assert cases.count(f": {name} passed\n") == 2, cases


@pytest.mark.parametrize("name", names_of(FEWER, {"case": kinds.PARTITIONED}))
def test_a_case_of_another_number_of_ranks(on_fewer, name):
    assert on_fewer.count(f": {name} passed\n") == 1, on_fewer
