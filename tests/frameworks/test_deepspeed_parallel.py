"""What DeepSpeed tests of its checkpoints beside ZeRO, on two ranks: see test_deepspeed_cases.py."""

import pathlib

import pytest

from tests.frameworks import deepspeed_kinds as kinds
from tests.frameworks.hf_common import names_of

pytestmark = [pytest.mark.frameworks("deepspeed"), pytest.mark.timeout(400)]
SOURCE = pathlib.Path(__file__).with_name("deepspeed_parallel_cases.py")
KINDS = {
    "case": kinds.PLAIN,
    "universal_case": kinds.PARTITIONED,
    "expert_case": kinds.EXPERTS,
    "pipeline_case": kinds.PIPELINES,
    "pipeline_of_zero_case": kinds.PIPELINES_OF_ZERO,
    "tensor_case": kinds.TENSORS,
}


@pytest.mark.parametrize("name", names_of(SOURCE, KINDS))
def test_a_case_of_deepspeeds_own_tests(cases, name):
    assert cases.count(f": {name} passed\n") == 2, cases
