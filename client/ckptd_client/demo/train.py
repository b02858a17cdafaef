"""One training rank: ``python -m ckptd_client.demo.train TASK``, with the environment variables of torchrun."""

import os
import socket
import sys
import time

import msgspec
import torch.distributed as dist

from ckptd_client.demo import journal
from ckptd_client.demo.plan import Task
from ckptd_client.demo.saving import CkptdSaver, Saver, TorchSaver
from ckptd_client.demo.training import Training


def join(rank: int, world_size: int) -> None:
    """Joins the process group. Rank 0 listens on MASTER_ADDR alone; torch itself would listen on every address."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    listening = socket.create_server((address, port)).detach() if rank == 0 else None
    store = dist.TCPStore(  # type: ignore[attr-defined]  # public, but not listed by torch
        address, port, world_size, rank == 0, master_listen_fd=listening
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def run(task: Task, rank: int, world_size: int) -> None:
    """Trains from the last checkpoint to the last step."""
    log = journal.Writer(task.journal)
    training = Training(rank=rank, world_size=world_size, steps=task.steps, work=task.work)
    saver: Saver
    if task.arena is None:
        saver = TorchSaver(task, training.state(), log, rank)
    else:
        saver = CkptdSaver(task, task.arena, training.state(), log)
    first = saver.restore()
    for step in range(first, task.steps):
        log.write(journal.Loss(step, training.step().hex()))
        time.sleep(task.work.pause_s)
        if step == first:
            saver.prepare()
        if (step + 1) % task.save_every == 0:
            saver.save(step)
    saver.finish()
    log.write(journal.Finished(training.digest()))


def main() -> None:
    """Runs the rank and ends it without the interpreter's teardown, in which gloo's threads may abort."""
    task = msgspec.json.decode(sys.argv[1], type=Task)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    join(rank, world_size)
    run(task, rank, world_size)
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
