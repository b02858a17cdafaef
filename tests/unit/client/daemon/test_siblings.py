"""Two ranks of one training that none has put into a group; and two runs, which they must not be taken for."""

import multiprocessing
import os
import subprocess
import sys
import time

import pytest

from ckptd.shared.base.errors import ConnectError
from ckptd.shared.files import locks
from ckptd_client._daemon.siblings import cause_of, sibling

LATER_S = 2.5  # ranks start at once

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # it has threads, and forks


def _hold(path, held):
    file = locks.take(path)
    held.set()
    time.sleep(60)
    os.close(file)


def _ask(path, ready, answers):
    ready.wait(60)
    answers.put(str(cause_of(ConnectError("still running", hint="takeover=True"), "j", path)))


@pytest.fixture(name="ranks")
def fixture_ranks():
    """Starts processes by multiprocessing, as torch.multiprocessing does; by fork, which imports nothing again."""
    context, begun = multiprocessing.get_context("fork"), []

    def begin(target, *args):
        process = context.Process(target=target, args=args)
        process.start()
        begun.append(process)
        return process

    begin.context = context
    yield begin
    for process in begun:
        process.kill()
        process.join()


def test_of_one_parent_and_started_together(ranks, tmp_path):
    held, answers = ranks.context.Event(), ranks.context.Queue()
    holds = ranks(_hold, str(tmp_path / "r00000-other.rank"), held)
    ranks(_ask, str(tmp_path / "r00000-own.rank"), held, answers)
    text = answers.get(timeout=120)
    assert f"job 'j' is held by pid {holds.pid}, a process of the same parent (pid {os.getpid()})" in text
    assert "init_process_group" in text
    assert "takeover" not in text


def test_a_run_that_is_started_later_is_another_run(ranks, tmp_path):
    held, answers = ranks.context.Event(), ranks.context.Queue()
    ranks(_hold, str(tmp_path / "r00000-other.rank"), held)
    time.sleep(LATER_S)
    ranks(_ask, str(tmp_path / "r00000-own.rank"), held, answers)
    assert answers.get(timeout=120) == "still running\n  hint: takeover=True"


def test_the_parent_itself_is_no_sibling(ranks, tmp_path):
    held = ranks.context.Event()
    ranks(_hold, str(tmp_path / "r00000-other.rank"), held)
    assert held.wait(60)
    assert sibling(str(tmp_path / "r00000-own.rank")) is None, "its parent is this process"


HOLDS = """
import sys, time
from ckptd.shared.files import locks
held = locks.take(sys.argv[1])
time.sleep(60)
"""
ASKS = """
import sys
from ckptd_client._daemon.siblings import sibling
print(sibling(sys.argv[1]))
"""


def test_what_a_shell_starts_may_be_two_runs(tmp_path):
    shell = f"""
{sys.executable} -c "$1" "$3" & pid=$!
until [ -e "$3" ]; do sleep 0.05; done
{sys.executable} -c "$2" "$4"; kill $pid; wait
"""
    files = [str(tmp_path / f"r00000-{name}.rank") for name in ("other", "own")]
    command = ["bash", "-c", shell, "bash", HOLDS, ASKS, *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "None\n"
