"""DLRover's flash checkpoint: shared memory of its own, a saver process beside rank 0.

The saver, its sockets and its shared memory take their names from TORCHELASTIC_RUN_ID and outlive the ranks: their
launcher ends the rest of their process group and removes the files of that name.
"""

import time

from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

from bench.peers import Finish, Place
from bench.peers.files import Directories, sync
from bench.states import State

_TIMEOUT_S = 120.0
_POLL_S = 0.01


class Flash(Directories):
    """One shard per rank. A save is written when the tracker file names it; nothing was synced then."""

    def __init__(self, place: Place) -> None:
        super().__init__(place, "rank_{rank}.pt")
        place.disk.mkdir(exist_ok=True)
        self._checkpointer = DdpCheckpointer(
            str(place.disk), local_shard_num=place.world_size, global_shard_num=place.world_size
        )

    def save(self, state: State, step: int) -> Finish:
        """Copies in the call; the saver process writes. Its steps count from 1."""
        path = self.directory(step) / f"rank_{self._place.rank}.pt"
        engine = self._checkpointer._engine  # noqa: SLF001 - save_checkpoint does not tell whether it saved
        saved = engine.save_to_storage(step + 1, {"model_states": state}, {"model_states": str(path)})
        if not saved:
            raise RuntimeError("it skipped the save: the saver was busy with the one before")
        return lambda: self._written(step)

    def _written(self, step: int) -> None:
        tracker = self._place.disk / "dlrover_latest.txt"
        deadline = time.monotonic() + _TIMEOUT_S
        while not tracker.exists() or tracker.read_text() != str(step + 1):
            if time.monotonic() > deadline:
                raise TimeoutError(f"step {step} was not written in {_TIMEOUT_S:g} s")
            time.sleep(_POLL_S)
        sync(self.directory(step))
