"""What the loop waits for, with real descriptors."""

import os
from contextlib import closing

import pytest
import zmq

from ckptd.daemon.readiness import Readiness


@pytest.fixture
def pipes():
    ends = [os.pipe() for _ in range(2)]
    yield ends
    for end in (end for pair in ends for end in pair):
        os.close(end)


def test_what_has_something_is_ready_and_nothing_else(pipes):
    readiness, wanted = Readiness(), tuple((end, zmq.POLLIN) for end, _ in pipes)
    os.write(pipes[1][1], b"x")
    readiness.wait(wanted, 1000)
    assert (pipes[0][0] in readiness, pipes[1][0] in readiness) == (False, True)
    os.read(pipes[1][0], 1)
    readiness.wait(wanted, 0)
    assert pipes[1][0] not in readiness


def test_other_things_and_other_flags_are_waited_for_at_once(pipes):
    readiness, (end, other) = Readiness(), (pipes[0][0], pipes[1][1])
    readiness.wait(((end, zmq.POLLIN),), 0)
    readiness.wait(((end, zmq.POLLIN), (other, zmq.POLLOUT)), 1000)
    assert (readiness.of(end), readiness.of(other)) == (0, zmq.POLLOUT)
    readiness.wait(((end, zmq.POLLIN),), 0)
    assert other not in readiness


def test_a_socket_is_found_by_itself():
    with zmq.Context() as context, closing(context.socket(zmq.PULL)) as one, closing(context.socket(zmq.PUSH)) as two:
        one.bind("inproc://one")
        two.connect("inproc://one")
        two.send(b"x")
        readiness = Readiness()
        readiness.wait(((one, zmq.POLLIN),), 1000)
        assert one in readiness
