"""What Lightning documents of its checkpoints, and tests itself, on two ranks, with DDP, FSDP1 and FSDP2."""

import pathlib

import pytest

from tests.frameworks.hf_common import cases_of

pytestmark = [pytest.mark.frameworks("lightning"), pytest.mark.timeout(400)]
SOURCE = pathlib.Path(__file__).with_name("lightning_cases.py")
NAMES, SHARDED_NAMES = cases_of(SOURCE), cases_of(SOURCE, "sharded_case")


def of(*kinds):
    """The cases of one kind are one launch, for all tests of the module: the parameter is of its scope."""
    return pytest.mark.parametrize("cases", kinds, indirect=True, scope="module")


@of("ddp", "fsdp1", "fsdp2")
@pytest.mark.parametrize("name", NAMES)
def test_a_case_of_lightnings_own_tests(cases, name):
    assert cases.count(f": {name} passed\n") == 2, cases


@of("fsdp1", "fsdp2")
@pytest.mark.parametrize("name", SHARDED_NAMES)
def test_a_case_of_directories_that_appear(cases, name):
    assert cases.count(f": {name} passed\n") == 2, cases
