"""``client.preempted``: when it may be asked, and what it does where it cannot know."""

import glob
import os

import pytest

from ckptd_client import UsageError
from tests.cluster import wait_for


def boards(node, job):
    return glob.glob(os.path.join(node.arena, "jobs", f"{job}-*", "*.steps"))


def test_after_close_it_raises_and_makes_no_board(node, job, join):
    client = join()
    assert not client.preempted(1)
    assert boards(node, job)
    client.close()
    wait_for(lambda: not boards(node, job))
    with pytest.raises(UsageError, match="closed"):
        client.preempted(2)
    assert not boards(node, job)
