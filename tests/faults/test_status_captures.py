"""docs/status-captures.md, the captures of real daemons: taken again, they are the same but for times and sizes.

To take them into the page: python -m tests.situations.
"""

import pathlib
import tempfile

import pytest

from tests.faults.mounts import needs_fuse, needs_root
from tests.faults.nodes.capture import shape_of
from tests.situations import page, real

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]
NEEDS = {"store full": needs_root, "store hung": needs_fuse}


def shape(text):
    """How lines are broken depends on the length of paths that only the run has."""
    return " ".join(" ".join(shape_of(text)).split())


@pytest.mark.parametrize("name", [pytest.param(name, marks=NEEDS.get(name, ())) for name in real.SITUATIONS])
def test_a_capture_of_real_daemons_is_what_is_printed_today(name):
    with tempfile.TemporaryDirectory(prefix="ck-") as base:
        shown = real.SITUATIONS[name](pathlib.Path(base))
    assert shape(page.captured(name)) == shape(f"$ ckptd status\n{shown}")
