"""Against a real ROUTER in a thread and a real lock in another process: F_GETLK does not show one's own locks."""

import os
import subprocess
import sys
import threading
from contextlib import contextmanager

import msgspec
import pytest
import zmq

from ckptd.arena.ask import Daemon, ask_status, require_daemon
from ckptd.shared.base.errors import BudgetError, CkptdError, ConnectError
from ckptd.shared.base.ids import JobKey
from ckptd.shared.protocol.messages import AskDrain, AskStatus, Done, Refused, StatusReply, decode_request, encode
from tests import pythons
from tests.unit import a_status

HOLD = """
import fcntl, sys
file = open(sys.argv[1], "wb")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def arena(tmp_path):
    return str(tmp_path)


@pytest.fixture
def held(arena):
    """The arena with its lock held by another process, whose pid this is."""
    with pythons.Popen(
        [sys.executable, "-c", HOLD, f"{arena}/lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        holder.stdout.readline()
        yield holder.pid
        holder.stdin.close()


@contextmanager
def answering(arena, answer):
    """A daemon's socket. answer: request -> frames to send."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.linger = 0
    socket.bind(f"ipc://{arena}/ckptd.sock")
    done = threading.Event()

    def serve() -> None:
        while not done.is_set():
            if socket.poll(20):
                peer, frame = socket.recv_multipart()
                for reply in answer(decode_request(frame)):
                    socket.send_multipart([peer, reply])
        socket.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        context.term()


def status_reply(request, **changes) -> bytes:
    return encode(StatusReply(reply_to=request.seq, status=a_status.status(**changes)))


def test_status_arrives(arena, held):
    with answering(arena, lambda request: [status_reply(request)]):
        assert ask_status(arena, 5) == a_status.status()


def test_a_late_answer_to_another_question_is_not_taken(arena, held):
    def answer(request):
        late = encode(StatusReply(reply_to=request.seq + 1000, status=a_status.status(node="late")))
        return [late, status_reply(request)]

    with answering(arena, answer):
        assert ask_status(arena, 5).node == "node03"


def test_drain_names_the_job(arena, held):
    asked = []

    def answer(request):
        asked.append(request)
        return [encode(Done(reply_to=request.seq))]

    with answering(arena, answer), Daemon(arena) as daemon:
        daemon.drain(JobKey("/store", "job"))
    assert asked == [AskDrain(seq=1, job=JobKey("/store", "job"))]


@pytest.mark.parametrize(("code", "kind"), [("budget", BudgetError), ("of the future", CkptdError)])
def test_a_refusal_is_the_error_of_its_code(arena, held, code, kind):
    refusal = Refused(reply_to=1, code=code, message="no", hint="do this")
    with answering(arena, lambda request: [encode(refusal)]), Daemon(arena) as daemon:
        with pytest.raises(kind) as caught:
            daemon.drain(JobKey("/store", "job"))
        assert type(caught.value) is kind
        assert caught.value.hint == "do this"


def test_another_schema_is_another_version(arena, held):
    with (
        answering(arena, lambda request: [status_reply(request, schema=99, version="9.0")]),
        pytest.raises(ConnectError, match=r"daemon is version 9\.0"),
    ):
        ask_status(arena, 5)


def test_an_answer_of_another_shape_names_the_version_in_it(arena, held):
    def answer(request):
        return [msgspec.msgpack.encode({"type": "StatusReply", "reply_to": request.seq, "status": {"version": "9.0"}})]

    with answering(arena, answer), pytest.raises(ConnectError, match=r"daemon is version 9\.0"):
        ask_status(arena, 5)


def test_no_arena(arena):
    with pytest.raises(ConnectError, match="there is no arena at") as caught:
        ask_status(f"{arena}/none", 5)
    assert "--arena or CKPTD_ARENA names another one; ckptd run starts a daemon in " in caught.value.hint


def test_an_arena_without_daemon(arena):
    with pytest.raises(ConnectError, match="no daemon runs in it"):
        ask_status(arena, 5)


def test_a_socket_left_behind_is_not_waited_for(arena):
    for name in ("lock", "ckptd.sock"):
        open(f"{arena}/{name}", "wb").close()
    with pytest.raises(ConnectError, match="and its process is gone") as caught:
        ask_status(arena, 60)
    assert "takes over what is staged there" in caught.value.hint


def test_a_daemon_without_socket(arena, held):
    assert require_daemon(arena) == held
    with pytest.raises(ConnectError, match=rf"pid {held}\) holds .* but has no socket there after 0.2 s"):
        ask_status(arena, 0.2)


def test_a_daemon_that_does_not_answer(arena, held):
    asked = []

    def answer(request):
        asked.append(request)
        return []

    with answering(arena, answer), pytest.raises(ConnectError, match=r"did not answer in 0\.5 s"):
        ask_status(arena, 0.5)
    assert asked == [AskStatus(seq=1)]


def test_a_daemon_that_restarts_is_found_again(arena, held):
    with Daemon(arena) as daemon:
        for node in ("before", "after"):
            with answering(arena, lambda request, node=node: [status_reply(request, node=node)]):
                assert daemon.status().node == node


def test_a_question_that_went_down_with_its_daemon_is_asked_again(arena, held):
    """It was handed over, and the daemon that had it ended: no answer can come, though a daemon is there."""
    asked = threading.Event()
    answers = []

    def unanswered(_request):
        asked.set()
        return []

    with Daemon(arena) as daemon:
        asking = threading.Thread(target=lambda: answers.append(daemon.status()))
        with answering(arena, unanswered):
            asking.start()
            assert asked.wait(5)
        with answering(arena, lambda request: [status_reply(request, node="after")]):
            asking.join()
    assert [status.node for status in answers] == ["after"]


def test_a_path_too_long_for_a_socket(arena, tmp_path):
    deep = str(tmp_path / ("d" * 120))
    os.mkdir(deep)
    with pythons.Popen(
        [sys.executable, "-c", HOLD, f"{deep}/lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        holder.stdout.readline()
        with pytest.raises(ConnectError) as caught:
            ask_status(deep, 1)
        holder.stdin.close()
    assert "choose a shorter arena" in caught.value.hint
