"""``client.preempted``: when it may be asked, and what it does where it cannot know."""

import contextlib
import glob
import os
import signal
import threading
import time

import pytest

from ckptd.shared.format import step_board
from ckptd_client import UsageError
from tests.cluster import wait_for
from tests.signals import resume, stop


def boards(node, job):
    return glob.glob(os.path.join(node.arena, "jobs", f"{job}-*", "*.steps"))


def test_after_close_it_raises_and_makes_no_board(node, job, join):
    client = join()
    assert not client.preempted(1)
    assert boards(node, job)
    client.close()
    wait_for(lambda: not boards(node, job))
    with pytest.raises(UsageError, match="closed"):
        client.preempted(2)
    assert not boards(node, job)


def test_a_step_is_written_to_one_board_and_is_no_question(node, job, join):
    client = join()
    for wrong in ("5", -1, 1.5, None):
        with pytest.raises(UsageError, match="step"):
            client.step(wrong)
    assert not boards(node, job)
    client.step(1)
    assert not client.preempted(2)
    client.step(2)
    (path,) = boards(node, job)
    with open(path, "rb") as file:
        page = file.read()
    assert step_board.decode_mark(page[step_board.MARK_OFFSET :])[0] == 2
    assert step_board.decode_step(page) == 2, "as of preempted"
    os.unlink(path)
    wait_for(lambda: client.step(3) or boards(node, job))
    client.close()
    with pytest.raises(UsageError, match="closed"):
        client.step(4)


def test_a_step_without_a_place_for_its_board_warns_once_and_costs_nothing(node, job, join, caplog):
    client = join()
    client.step(1)
    (path,) = boards(node, job)
    os.unlink(path)
    os.mkdir(path)
    wait_for(lambda: client.step(2) or any("nor report its steps" in text for text in caplog.messages))
    client.step(3)
    assert sum("nor report its steps" in text for text in caplog.messages) == 1
    os.rmdir(path)
    client.close()


def tellers():
    return [thread for thread in threading.enumerate() if thread.name == "ckptd-preemption"]


@contextlib.contextmanager
def stopped(node):
    """A daemon that hangs."""
    stop(node.daemon.pid)
    try:
        yield
    finally:
        resume(node.daemon.pid)


def test_a_daemon_that_hangs_is_notified_by_one_thread_and_it_is_said_what_to_type(node, join, caplog):
    client, step = join(), iter(range(1_000_000))
    client.preempted(next(step))

    def no_answer():
        client.preempted(next(step))
        return [text for text in caplog.messages if "does not answer" in text]

    with stopped(node):
        signal.raise_signal(signal.SIGTERM)
        wait_for(no_answer)
        until = time.monotonic() + 4
        while time.monotonic() < until:
            (text,) = no_answer()
            assert len(tellers()) == 1
            time.sleep(0.05)
    assert f"kill -KILL {node.daemon.pid}" in text
    assert "SIGTERM to rank 0" in text
    wait_for(lambda: client.preempted(next(step)))
    wait_for(lambda: not tellers())
    assert any("has it now" in text for text in caplog.messages)


ENDS = """
import logging, os, signal, sys
import ckptd_client
logging.basicConfig()
client = ckptd_client.connect("ends", start=False)
client.preempted(0)
os.kill(int(sys.argv[1]), signal.SIGSTOP)
signal.raise_signal(signal.SIGTERM)
client.preempted(1)
"""


def test_a_process_that_ends_while_it_notifies_a_daemon_that_hangs_ends_without_a_traceback(node):
    process = node.run(ENDS, str(node.daemon.pid))
    try:
        _, err = process.communicate(timeout=120)
    finally:
        resume(node.daemon.pid)
    assert (process.returncode, b"Traceback" in err) == (0, False), err.decode()


def test_a_lone_rank_without_a_board_saves_on_a_signal(node, job, join, caplog):
    client = join()
    (rank_file,) = glob.glob(os.path.join(node.arena, "jobs", f"{job}-*", "*.rank"))
    no_board = rank_file.replace(".rank", ".steps")
    os.mkdir(no_board)
    assert client.preempted(1) is False
    signal.raise_signal(signal.SIGTERM)
    assert client.preempted(2) is True
    assert client.preempted(3) is True
    client.close()
    os.rmdir(no_board)
    (text,) = [text for text in caplog.messages if "cannot hear of a preemption" in text]
    assert no_board in text
    assert "df -h" in text
