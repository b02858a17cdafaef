"""One zygote for all tests here; a cluster's log when a test fails."""

import contextlib

import pytest

from tests.faults.nodes.clusters import Cluster, Zygote, a_cluster


@pytest.fixture(name="zygote", scope="session")
def fixture_zygote():
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    if report.failed and call.when == "call":
        for cluster in {id(v): v for v in item.funcargs.values() if isinstance(v, Cluster)}.values():
            with contextlib.suppress(OSError):
                report.sections.append(("daemons", cluster.log()))


@pytest.fixture(name="four", scope="module")
def fixture_four(zygote):
    """a, b, c, d: every test leaves four such daemons, and no job."""
    with a_cluster(zygote) as cluster:
        yield cluster
