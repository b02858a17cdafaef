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
from ckptd.peers.watches import Watches
from ckptd.shared.protocol.topology import Peer
from tests import pythons
from tests.ports import free_port

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
TRIES_S = 1.0  # ZeroMQ dials ten times in it, and says so each time


def a_remote(context: "zmq.Context[zmq.Socket[bytes]]", watches: Watches) -> Remote:
    """Of a daemon that does not listen, and has not for long."""
    keys = make_keys()
    peer = Peer("b", "arena", f"tcp://127.0.0.1:{free_port()}", keys.public, "")
    remote = Remote(context, watches, peer, keys, Link(instance=1, timeout_s=1.0, new_end=lambda: 1))
    remote.connect()
    remote.down_since = 0.0
    return remote


def watched(left: int) -> None:
    """Looks after a daemon that does not listen, first with so many descriptors left, and closes the connection."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    remote = a_remote(context, Watches(context))
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


def test_of_many_that_do_not_answer_the_reason_is_asked_of_a_few():
    """Each is asked in turn as others answer: their sockets are what a daemon has few descriptors for."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    watches = Watches(context)
    remotes = [a_remote(context, watches) for _ in range(100)]
    before = len(os.listdir("/proc/self/fd"))
    for remote in remotes:
        remote.look(100.0)
    assert 0 < len(os.listdir("/proc/self/fd")) - before <= 128
    assert (remotes[0].connects, remotes[-1].connects) == (False, True)
    remotes[0].close()
    remotes[-1].look(101.0)
    assert not remotes[-1].connects
    for remote in remotes:
        remote.close()
    context.term()
