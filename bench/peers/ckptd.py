"""ckptd with a daemon of its own, which rank 0 starts."""

import time

import torch.distributed as dist

import ckptd_client
from bench import states
from bench.node import Node
from bench.peers import Finish, Place
from bench.peers.files import nbytes_of
from bench.states import State

_DURABLE_TIMEOUT_S = 120.0
_EARLY_SAVES = 3
_FIRST_EARLY = 1000  # steps that the loop does not use
_TOGETHER_S = 15.0  # for 2 GiB
_JOB = "peers"


class Staged:
    """Saves that are copied before save returns."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._node = Node(place.shm, place.disk / "store")
        if place.rank == 0:
            self._node.start()
        dist.barrier()
        self._client = ckptd_client.connect(
            job=_JOB, store=str(self._node.store), arena=str(self._node.arena), start=False
        )

    def prepare(self, state: State) -> None:
        """Plans, and waits for the slots."""
        self._client.prepare(state)

    def save(self, state: State, step: int) -> Finish:
        """Stages; the daemon completes the save."""
        handle = self._client.save(state, step)
        return lambda: handle.wait("durable", _DURABLE_TIMEOUT_S)

    def before_step(self) -> None:
        """The client's own hook waits if necessary."""

    def nbytes(self, step: int) -> int:
        """Bytes of this rank's images."""
        (directory,) = (self._node.store / _JOB).glob(f"step-{step:09}.*")
        return nbytes_of(directory.glob(f"r{self._place.rank:05}-p*"))

    def discard(self, step: int) -> None:
        """The daemon keeps the newest only."""

    def close(self) -> None:
        """Ends the client; rank 0 ends the daemon when all have."""
        self._client.close()
        dist.barrier()
        if self._place.rank == 0:
            self._node.close()


class Overlapped(Staged):
    """Saves with late copies."""

    def prepare(self, state: State) -> None:
        """The first saves are copied at once, until the optimizer's memory is collapsed into huge pages."""
        super().prepare(state)
        self._client.attach(self._place.optimizer)
        for step in range(_FIRST_EARLY, _FIRST_EARLY + _EARLY_SAVES):
            states.mutate(state, step)
            self._client.save(state, step).wait("durable", _DURABLE_TIMEOUT_S)
            self._place.optimizer.step()
            time.sleep(_TOGETHER_S / _EARLY_SAVES)
