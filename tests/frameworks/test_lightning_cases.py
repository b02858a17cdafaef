"""What Lightning documents of its checkpoints, and tests itself, on two ranks, with DDP, FSDP1 and FSDP2."""

import pathlib

import pytest

from tests.frameworks.hf_common import cases_of

pytestmark = [pytest.mark.frameworks("lightning"), pytest.mark.timeout(400)]
SOURCE = pathlib.Path(__file__).with_name("lightning_cases.py")
NAMES, SHARDED_NAMES = cases_of(SOURCE), cases_of(SOURCE, "sharded_case")


def every(kinds, names):
    """Each name for each kind, whose cases are one launch."""
    both = [(kind, name) for kind in kinds for name in names]
    return pytest.mark.parametrize(("cases", "name"), both, indirect=["cases"])


@every(["ddp", "fsdp1", "fsdp2"], NAMES)
def test_a_case_of_lightnings_own_tests(cases, name):
    assert cases.count(f": {name} passed\n") == 2, cases


@every(["fsdp1", "fsdp2"], SHARDED_NAMES)
def test_a_case_of_directories_that_appear(cases, name):
    assert cases.count(f": {name} passed\n") == 2, cases
