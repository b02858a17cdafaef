"""Workers for the tests of this folder."""

import pytest

from ckptd.store.workers import Stores
from ckptd.system.niceness import Niceness
from tests.signals import resume


@pytest.fixture(name="make")
def fixture_make():
    """Makes Stores, which end with the test."""
    made = []

    def make(hang_s=60.0):
        made.append(Stores(niceness=Niceness(), hang_s=hang_s))
        return made[-1]

    yield make
    for stores in made:
        for link in stores.links:
            if link.pid:  # not one that is being started
                resume(link.pid)
        stores.close()
