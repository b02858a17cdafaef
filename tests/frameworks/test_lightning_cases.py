"""What Lightning documents of its checkpoints, and tests itself, on two ranks, with DDP, FSDP1 and FSDP2."""

import pathlib

import pytest

from tests.frameworks.hf_common import cases_of

pytestmark = [pytest.mark.frameworks("lightning"), pytest.mark.timeout(400)]
SOURCE = pathlib.Path(__file__).with_name("lightning_cases.py")


@pytest.mark.parametrize("name", cases_of(SOURCE))
@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])
def test_a_case_of_lightnings_own_tests(cases, kind, name):
    assert cases.count(f": {kind}-{name} passed\n") == 2, cases


@pytest.mark.parametrize("name", cases_of(SOURCE, "sharded_case"))
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_a_case_of_directories_that_appear(cases, kind, name):
    assert cases.count(f": {kind}-{name} passed\n") == 2, cases
