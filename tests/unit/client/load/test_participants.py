"""The name of a read that all ranks of a job make, which their nodes must give alike."""

from ckptd.shared.base.ids import SaveId
from ckptd_client._load.shared_read.participants import all_ranks
from tests.runs import RUN

SAVE = SaveId(1, 1, 1, RUN)


def test_the_reads_of_a_job_are_counted_for_that_job(join, job):
    """A process may have clients of two jobs, whose ranks are not in the same processes on all nodes."""
    one, two = join(f"{job}-1"), join(f"{job}-2")
    for client in (one, two):
        client._link.nodes = 2
    names = [all_ranks(client._link, client._link.ask)(SAVE).here.read for client in (one, one, two, one)]
    assert names == ["all.1", "all.2", "all.1", "all.3"]
