"""Each mistake of a new user ends in time, and says what is wrong, where, and what to type."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.mistakes.judge import findings
from tests.mistakes.play import play
from tests.mistakes.run import AT_ONCE
from tests.mistakes.table import MISTAKES, VARIANTS

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300), pytest.mark.xdist_group("mistakes")]

LONG = os.environ.get("FAULTS") == "long"
PLAYED = [mistake for mistake in MISTAKES if LONG or mistake.name not in VARIANTS]


def _param(mistake):
    marks = [pytest.mark.xfail(strict=True, reason=f"waits for {mistake.waits_for}")] if mistake.waits_for else []
    if mistake.needs_root and os.geteuid() != 0:
        marks = [pytest.mark.skip(reason="mounting a file system needs root")]
    return pytest.param(mistake, id=mistake.name, marks=marks)


@pytest.fixture(scope="module")
def outcomes(request):
    """Most of them only wait, so several are made at once; each test takes what came of its own."""
    items = [item for item in request.session.items if item.module is request.module and hasattr(item, "callspec")]
    chosen = [item.callspec.params["mistake"] for item in items if not item.get_closest_marker("skip")]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {mistake.name: pool.submit(play, mistake) for mistake in chosen}


@pytest.mark.parametrize("mistake", [_param(mistake) for mistake in PLAYED])
def test_mistake(mistake, outcomes):
    outcome = outcomes[mistake.name].result()
    found = findings(mistake, outcome)
    assert not found, "\n".join([*found, "", mistake.typed, "", outcome.text])


def test_there_are_enough_of_them():
    assert len(MISTAKES) >= 80
