"""A latch that other processes wait for, until it opens or its holder is gone."""

import multiprocessing
import os
import signal
import time

import pytest

from ckptd.shared.base.ids import SaveId
from ckptd_client.integrations._kit.latch import Latch, await_latch
from tests import forks
from tests.runs import RUN

SAVE = SaveId(3, 1, 100, RUN)
IMAGES = ["r00000-p00.safetensors", "r00001-p00.safetensors", "r00001-p01.safetensors"]
LISTED = [".metadata", "objects.pt"]


def _hold(pipe):
    latch = Latch()
    pipe.send(latch.place)
    time.sleep(60)


@pytest.mark.parametrize("context", [multiprocessing.get_context("fork"), forks.context], ids=["fork", "spawn"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_who_waits_for_a_latch_is_released_when_it_opens(context):
    latch = Latch()
    waiting = context.Process(target=await_latch, args=latch.place)
    waiting.start()
    waiting.join(3)
    assert waiting.is_alive()
    latch.open()
    waiting.join(20)
    assert waiting.exitcode == 0
    latch.close()


def test_who_waits_for_a_latch_is_released_when_its_holder_is_killed():
    mine, theirs = forks.context.Pipe()
    holder = forks.start(_hold, theirs)
    waiting = forks.start(await_latch, *mine.recv())
    waiting.join(3)
    assert waiting.is_alive()
    os.kill(holder.pid, signal.SIGKILL)
    waiting.join(20)
    assert waiting.exitcode == 0
    holder.join()


def test_none_waits_for_a_latch_of_its_own_or_of_one_who_is_gone():
    latch = Latch()
    await_latch(*latch.place)
    place = latch.place
    latch.close()
    latch.close()
    await_latch(2**22 - 1, place[1])
    latch.open()  # as a thread may, which waited for the end of a save, when that is landed already
