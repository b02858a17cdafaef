"""What each rank of test_megatron.py runs.

megatron_ranks.py train <folder>      trains, saves and is killed, in the middle of a save too; expected states into it
megatron_ranks.py resume <folder>     the same job, started again, by core's own load and by ours
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import check_is_distributed_checkpoint
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron_training import Training, begin, difference, end

import ckptd_client
from ckptd_client.integrations.megatron import CkptdLoadStrategy, CkptdSaveStrategy, finish

JOB, TRACKER, LAST = "megatron", "latest_checkpointed_iteration.txt", 6


def directory(step):
    return os.path.join(sys.argv[2], f"iter_{step:07d}")


def expected(step):
    return os.path.join(sys.argv[2], f"expected-{step}-{dist.get_rank()}.pt")


def connect():
    return ckptd_client.connect(JOB, start=False, redundancy="none")


def begin_save(training, strategy, queue, step):
    """As a trainer does it: the request is scheduled, its tracker written when all else is done."""
    if dist.get_rank() == 0:
        os.makedirs(directory(step))
    dist.barrier()
    state = training.sharded(step)
    torch.save(training.plain(), expected(step))
    request = dist_checkpointing.save(state, directory(step), strategy, async_sharded_save=True)

    def track():
        if dist.get_rank() == 0:
            with open(os.path.join(sys.argv[2], TRACKER), "w") as file:
                file.write(str(step))

    request.add_finalize_fn(track)
    queue.schedule_async_request(request)


def train():
    training, queue = Training(), AsyncCallsQueue()
    client = connect()
    strategy = CkptdSaveStrategy(client)
    training.step(1)
    training.step(2)
    begin_save(training, strategy, queue, 2)
    training.step(3)  # writes to what was saved
    deadline = time.monotonic() + 60
    while not queue.maybe_finalize_async_calls(blocking=False):
        assert time.monotonic() < deadline
        assert not check_is_distributed_checkpoint(directory(2)) or strategy.handle.milestone == "durable"
        time.sleep(0.02)
    assert strategy.handle.milestone == "durable"
    with open(os.path.join(sys.argv[2], TRACKER)) as file:
        assert file.read() == "2"
    training.step(4)
    begin_save(training, strategy, queue, 4)
    assert not check_is_distributed_checkpoint(directory(4))
    strategy.handle.wait("staged", 60)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def resume():
    with connect() as client:
        if dist.get_rank() == 0:
            assert finish(client, directory(2))
            assert not check_is_distributed_checkpoint(directory(4))
            assert finish(client, directory(4), 60)
        dist.barrier()
        for step, strategy in [(2, None), (4, None), (4, CkptdLoadStrategy(client)), (2, CkptdLoadStrategy(client))]:
            training = Training()
            loaded = dist_checkpointing.load(training.sharded(loading=True), directory(step), strategy)
            assert training.take(loaded) == step
            wanted = torch.load(expected(step), weights_only=True)
            assert not difference(wanted, training.plain()), (step, difference(wanted, training.plain()))
            if strategy is not None:
                print("tier", step, strategy.tier)
            for number in range(step + 1, LAST + 1):
                training.step(number)
            alone = Training()
            for number in range(1, LAST + 1):
                alone.step(number)
            assert not difference(alone.plain(), training.plain())
    end()


if __name__ == "__main__":
    begin()
    globals()[sys.argv[1]]()
