"""What becomes of a daemon's connections when no descriptor is left."""

import os
import resource
import subprocess
import sys
import time

import pytest
import zmq

from ckptd.peers.keys import make_keys
from ckptd.peers.link import Link
from ckptd.peers.remote import Remote
from ckptd.shared.protocol.topology import Peer
from tests import pythons
from tests.ports import free_port

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
TRIES_S = 1.0  # ZeroMQ dials ten times in it, and says so each time


def watched(left: int) -> None:
    """Looks after a daemon that does not listen, first with so many descriptors left, and closes the connection."""
    context, keys = zmq.Context(), make_keys()
    peer = Peer("b", "arena", f"tcp://127.0.0.1:{free_port()}", keys.public, "")
    remote = Remote(context, peer, keys, Link(instance=1, timeout_s=1.0, new_end=lambda: 1))
    remote.connect()
    remote.down_since = 0.0
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull, "rb") as lowest:
        free = lowest.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + left, limits[1]))
    remote.look(100.0)
    time.sleep(TRIES_S)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    remote.look(101.0)
    remote.close()
    context.term()


@pytest.mark.parametrize("left", range(4))
def test_no_descriptor_for_the_reason_of_a_failed_dial_holds_nothing_up(left):
    """ZeroMQ's thread waits for ever with what it reports to no reader, and this one for that one's lock."""
    script = f"from {__name__} import watched; watched({left})"
    try:
        pythons.run([sys.executable, "-c", script], cwd=ROOT, timeout=20, check=True)
    except subprocess.TimeoutExpired:
        pytest.fail("the connection is not closed in 20 s")
