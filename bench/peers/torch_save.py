"""torch.save in the loop."""

import torch

from bench.peers import Finish, Place
from bench.peers.files import Directories, sync
from bench.states import State


class TorchSave(Directories):
    """One file per rank, synced before save returns."""

    def __init__(self, place: Place) -> None:
        super().__init__(place, "rank-{rank}.pt")

    def save(self, state: State, step: int) -> Finish:
        """Writes and syncs."""
        directory = self.directory(step)
        directory.mkdir(exist_ok=True)
        torch.save(state, directory / f"rank-{self._place.rank}.pt")
        sync(directory)
        return lambda: None
