import pytest

from tests.unit.peers.planes import World


@pytest.fixture
def world(tmp_path):
    with World(tmp_path) as made:
        yield made
