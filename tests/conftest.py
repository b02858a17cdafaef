"""Hypothesis profiles: the default keeps `make test` quick, HYPOTHESIS_PROFILE=long searches for hours.

And the order of the files: those that take longest come first, so that no worker is left with one at the end. And the
groups: tests that share what a fixture of a module makes run in one worker, so that it is made once, and so do those of
a short file, so that the workers are not handed thousands of pieces. And the workers, which are forked. And SHARE=K/N:
the K-th of N shares of the tests, K counted on beyond N.
"""

import gc
import os
import signal
import sys
import zlib

import pytest
from hypothesis import HealthCheck, settings

from tests import longest, pythons

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # begun in the background: what tests start is to hear it
    signal.signal(signal.SIGINT, signal.default_int_handler)

_SHORT_S = 10.0
_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

settings.register_profile(
    "quick", max_examples=40, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=_SLOW
)
settings.register_profile(
    "long", max_examples=3000, stateful_step_count=80, deadline=None, suppress_health_check=_SLOW, print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
gc.disable()  # until all tests are collected: each collection of garbage looks at all that imports have made


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config, specs):
    """Workers, and the servers that their tests have, are forked from processes that have imported what all need."""
    python = pythons.fork_workers(config.args)
    for spec in specs:
        spec.python = python


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Longest files first, the others by name; within a file as they were; users of a module's fixture together."""
    number, _, shares = os.environ.get("SHARE", "").partition("/")
    if shares:
        chosen = int(number) % int(shares)
        others = [item for item in items if zlib.crc32(item.nodeid.encode()) % int(shares) != chosen]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % int(shares) == chosen]
    seconds = longest.seconds_of_files()
    items.sort(key=lambda item: (-seconds.get(_file_of(item), 0.0), _file_of(item)))
    for item in items:
        path = _file_of(item)
        together = seconds.get(path, 0.0) < _SHORT_S or _shares_a_fixture(item)
        if together and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(path))


def _file_of(item):
    return item.nodeid.partition("::")[0]


def _shares_a_fixture(item):
    """Whether a fixture that is made once for a module, or a package, is among the item's."""
    fixtures = getattr(item, "_fixtureinfo", None)
    of_names = fixtures.name2fixturedefs.values() if fixtures else ()
    return any(fixture.scope in ("module", "package") for defs in of_names for fixture in defs)


def pytest_collection_finish(session):
    """What is here stays to the end: no collection of garbage looks at it, and no fork copies it for that."""
    if getattr(session.config.option, "loadgroup", False):
        alone = [i.nodeid for i in session.items if i.get_closest_marker("xdist_group") and "@" not in i.nodeid]
        assert not alone, f"this pytest and this pytest-xdist do not keep groups together: {alone[:3]}"
    if "torch" in sys.modules:  # a thread that waits for another's part of a small tensor spins
        sys.modules["torch"].set_num_threads(1)
    gc.freeze()
    gc.enable()
