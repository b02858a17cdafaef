"""Signals that are noted: each test is a process of its own, which ends by the signal where it should."""

import os
import signal
import sys

import pytest

from ckptd_client._preempt import signals
from tests import pythons

HEAD = f"""
import faulthandler, os, signal, sys, threading, time
sys.path.insert(0, {os.path.dirname(signals.__file__)!r})  # the module alone: a client takes seconds to be imported
from signals import Listener
TERM, USR1 = signal.SIGTERM, signal.SIGUSR1
said = []
def user(*_): said.append("user")
def send(number): os.kill(os.getpid(), number)
def in_thread(call):
    thread = threading.Thread(target=call); thread.start(); thread.join()
"""


def run(code: str) -> tuple[int, list[str], str]:
    done = pythons.run([sys.executable, "-c", HEAD + code], capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout.split(), done.stderr


def test_of_two_listeners_the_one_that_is_left_receives_and_so_does_the_user():
    code = """
signal.signal(TERM, user)
a, b = Listener(), Listener()
a.close()
send(TERM)
print(b.received, *said)
b.close()
send(TERM)
print(*said, signal.getsignal(TERM) is user)
"""
    assert run(code) == (0, ["SIGTERM", "user", "user", "user", "True"], "")


@pytest.mark.parametrize(
    "how", ["b.close(); a.close()", "a.close(); b.close()", "in_thread(a.close); in_thread(b.close)"]
)
def test_when_the_last_has_closed_the_signal_ends_the_process_again(how):
    assert run(f"a, b = Listener(), Listener()\n{how}\nsend(TERM)\nprint('lives')")[:2] == (-signal.SIGTERM, [])


@pytest.mark.parametrize(
    "over", ["before = signal.signal(TERM, lambda *a: (user(), before(*a)))", "signal.signal(TERM, user)"]
)
def test_a_handler_that_a_user_installs_later_stays(over):
    code = f"""
a = Listener()
{over}
send(TERM)
b = Listener()
send(TERM)
print(len(said), b.received)
a.close(); b.close()
send(TERM)
print(len(said))
"""
    assert run(code) == (0, ["2", "SIGTERM", "3"], "")


def test_a_handler_that_a_user_puts_back_listens_no_more_and_is_used_again():
    code = """
a = Listener()
kept = signal.getsignal(TERM)
signal.signal(TERM, user)
a.close()
signal.signal(TERM, kept)
b = Listener()
send(TERM)
print(a.received, b.received)
b.close()
print(signal.getsignal(TERM) == signal.SIG_DFL)
"""
    assert run(code) == (0, ["SIGTERM", "True"], "")


def test_what_is_handled_outside_of_python_is_left_alone():
    code = """
faulthandler.register(USR1)
a = Listener()
send(USR1)
print(*a.not_received)
a.close()
send(USR1)
print("lives")
"""
    status, out, err = run(code)
    assert (status, out) == (0, ["SIGUSR1", "lives"])
    assert err.count("most recent call first") == 2


def test_a_forked_child_is_ended_by_the_signal_and_may_listen_itself():
    code = """
a = Listener()
def ends(child):
    pid = os.fork()
    if not pid:
        child()
        os._exit(5)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
def listens():
    b = Listener()
    send(TERM)
    os._exit(7 if b.received and not a.received else 6)
print(ends(lambda: send(TERM)), ends(listens), a.received)
"""
    assert run(code) == (0, ["-15", "7"], "")


def test_a_child_that_is_signalled_as_it_is_forked_is_ended_too():
    code = """
a, ends = Listener(), set()
for _ in range(50):
    pid = os.fork()
    if not pid:
        time.sleep(2)
        os._exit(5)
    os.kill(pid, TERM)
    ends.add(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(*ends, signal.pthread_sigmask(signal.SIG_BLOCK, ()))
send(TERM)
print(a.received)
"""
    assert run(code) == (0, ["-15", "set()", "SIGTERM"], "")


def test_first_in_a_thread_nothing_is_received_and_nothing_is_installed():
    code = "in_thread(lambda: said.append(Listener())); print(*said[0].not_received, flush=True); send(TERM)"
    assert run(code)[:2] == (-signal.SIGTERM, ["SIGTERM", "SIGUSR1"])


def test_of_a_client_that_was_dropped_nothing_is_left():
    assert run("a = Listener(); del a; send(TERM); print('lives')")[:2] == (-signal.SIGTERM, [])
