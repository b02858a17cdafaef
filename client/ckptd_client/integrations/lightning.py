"""Lightning: ``Trainer(plugins=[CkptdCheckpointIO(job=..., store=...)])``, and checkpoints no longer stop training.

For single devices and DDP, where rank 0 saves what all have. A checkpoint is staged in memory as the file that
Lightning would have written; it appears under its name when the daemon has drained it, whole, and is what torch.load
and Lightning itself read.
"""

import contextlib
import io
import logging
import os
import time
from typing import Any, NamedTuple

import torch

from ckptd.shared.base.errors import CkptdError, ConnectError, RestoreError, UsageError
from ckptd_client.client import Client, staging_of
from ckptd_client.files import TorchFile
from ckptd_client.handle import SaveHandle
from ckptd_client.integrations._kit.framework import Framework
from ckptd_client.integrations._kit.options import connect_with
from ckptd_client.integrations._kit.ranks import from_rank_0
from ckptd_client.integrations._kit.unproved import check_unproved, find_saved, is_keyed

log = logging.getLogger("ckptd_client")

LIGHTNING = Framework("Lightning", "lightning", "2.5")
_BASE = LIGHTNING.base("lightning.pytorch.plugins.io", "TorchCheckpointIO")


class _Save(NamedTuple):
    """One in which a path was."""

    step: int  # Lightning's
    handle: SaveHandle


class CkptdCheckpointIO(_BASE):  # type: ignore[misc, valid-type]  # a class only where Lightning is
    """A CheckpointIO for `Trainer(plugins=[...])`. Its arguments are checked when it is made.

    Saves and removals are those of rank 0 alone, as Lightning has it; all ranks call `load_checkpoint`. A checkpoint
    that Lightning removes before it is drained (`save_top_k`) is removed once it is drained.

    Args:
        drain: True: every checkpoint is written to the store, whatever `drain_every` says; of those that wait for a
            slow store only the newest, with a warning for the others. False: as `drain_every` says.
        connect_settings: Arguments of `ckptd_client.connect`.
    """

    def __init__(self, *, drain: bool = True, **connect_settings: Any) -> None:
        LIGHTNING.module("lightning")
        super().__init__()
        self.handle: SaveHandle | None = None
        self._drain = drain
        self._settings = connect_settings
        self._client: Client | None = None
        self._saved: dict[str, list[_Save]] = {}  # by path, those that have not ended, and the newest, which is last
        self._of_step: tuple[int, str, dict[str, TorchFile]] = (-1, "", {})  # step, directory, what was saved there
        self._doomed: set[str] = set()  # paths, to be removed once they are there
        if _may_be_rank_0():  # it joins at its first save or load: tried now, since that may be hours away
            connect_with(connect_settings, alone=True).close()

    @property
    def client(self) -> Client:
        """The client of rank 0."""
        if self._client is None:
            self._client = connect_with(self._settings, alone=True)
        return self._client

    def last(self) -> str | None:
        """Returns the path of the newest checkpoint, drained or not, or None: for `trainer.fit(ckpt_path=io.last())`.

        Collective where there are several ranks.
        """
        newest: str | None = from_rank_0(self._newest)
        return newest

    def _newest(self) -> str | None:
        files = self.client.load_files()
        if files is None:
            return None
        with files:
            return os.path.join(files.directory, files.names[0]) if files.directory and files.names else None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Stages the checkpoint. Training may go on, and change every tensor, when it returns.

        Raises UsageError for a misuse, and what pickling raises; an operational fault is logged.
        """
        if storage_options is not None:
            raise UsageError("storage_options have no meaning here", hint="leave them out")
        if "://" in os.fspath(path):
            raise UsageError(f"{path} is no path of a file system", hint="a dirpath that all nodes see")
        where = os.path.abspath(os.fspath(path))
        directory, name = os.path.split(where)
        os.makedirs(directory, exist_ok=True)  # save_last="link" links into it before the checkpoint is there
        try:
            client = self.client
        except ConnectError as error:  # it was there when this was made: a fault, and training goes on
            log.warning("ckptd: %s is not saved: %s", where, error)
            return
        files = self._with_those_of_the_step(int(checkpoint.get("global_step", 0)), directory)
        files[name] = TorchFile(checkpoint)
        step = client.free_step(self._of_step[0])
        self.handle = client.save_files(files, step, directory=directory, whole=False, drain=self._drain)
        for each in files:
            path = os.path.join(directory, each)
            before = [save for save in self._saved.get(path, []) if save.handle.end is None]
            self._saved[path] = [*before, _Save(self._of_step[0], self.handle)]
        self._doomed.discard(where)
        self._remove_doomed()

    def _with_those_of_the_step(self, step: int, directory: str) -> dict[str, TorchFile]:
        """What was saved at this very step, such as a best one before last.ckpt: a newer save takes an older's turn.

        Unless it is drained already, or has other content now: weights that are swapped for an average, say.
        """
        known, where, files = self._of_step
        if (known, where) != (step, directory) or not self._is_waiting_unchanged(files):
            files = {}
            if known == step and self.handle is not None:
                await_turn(self.client, self.handle)
        self._of_step = (step, directory, files)
        return files

    def _is_waiting_unchanged(self, files: dict[str, TorchFile]) -> bool:
        handle = self.handle
        return bool(files) and handle is not None and handle.end is None and self.client.are_still(handle, files)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """From memory when it is the newest, else from the file at path. All ranks call it; FileNotFoundError.

        With a key it is read through ckptd, whichever it is; what ckptd refused raises.
        """
        where = os.path.abspath(os.fspath(path))
        data = from_rank_0(lambda: self._read(where))
        if data is None:
            found: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only)
            return found
        unpickled: dict[str, Any] = torch.load(io.BytesIO(data), map_location=map_location, weights_only=weights_only)
        return unpickled

    def _read(self, where: str) -> bytearray | None:
        """The file's bytes, when it is the newest checkpoint. None: it is to be read where it lies."""
        if is_keyed(self.client):
            return self._read_proved(where)
        saves = self._saved.get(where, [])
        if saves and saves[-1].handle is not self.handle:  # an older one, which lies there when it is drained
            _settled(saves)
            return None
        try:
            files = self.client.load_files()
        except RestoreError as error:  # of what is published bytes are shared: written over here, they are gone there
            if not os.path.exists(where):
                raise
            log.warning("ckptd: %s is read where it lies: %s", where, error)
            return None
        if files is None:
            return None
        with files:
            name = os.path.basename(where)
            if files.directory != os.path.dirname(where) or name not in files or files.is_replaced(name):
                return None
            return files.read(name)

    def _read_proved(self, where: str) -> bytearray | None:
        """The file's bytes, of whatever checkpoint. None: ckptd knows nothing of it. Raises IntegrityError."""
        folder, name = os.path.split(where)
        steps = self.client.steps(by_save=True)
        files, refused = find_saved(self.client, steps, lambda files: files.directory == folder and name in files)
        if files is None:
            if refused:
                check_unproved(self.client, where, refused)
            return None
        with files:
            if files.is_replaced(name):
                check_unproved(self.client, where, "it was altered after it was saved")
            return files.read(name)

    def remove_checkpoint(self, path: Any) -> None:
        """Removes the file: now if it is drained, else once it is."""
        self._doomed.add(os.path.abspath(os.fspath(path)))
        self._remove_doomed()

    def _remove_doomed(self) -> None:
        for where in sorted(self._doomed):
            saves = self._saved.get(where)
            # What an earlier run saved may still be on its way: it is looked for until teardown.
            if os.path.exists(where) if saves is None else all(save.handle.end is not None for save in saves):
                self._doomed.discard(where)
                self._saved.pop(where, None)
                self._of_step[2].pop(os.path.basename(where), None)
                super().remove_checkpoint(where)

    def teardown(self) -> None:
        """Blocks until all checkpoints are drained, removes those that Lightning removed, closes the client."""
        if self._client is None:
            return
        for where, saves in self._saved.items():
            problem = _settled(saves)
            if problem is not None and where not in self._doomed:
                log.warning("ckptd: %s is not written: %s", where, problem)
        self._remove_doomed()
        self._client.close()
        self._client = None
        self._saved, self._of_step = {}, (-1, "", {})


def _settled(saves: list[_Save]) -> CkptdError | None:
    """Blocks until each is durable or cannot be. Why none of the newest step is: those of one step are alike."""
    problem: CkptdError | None = None
    step = -1
    for save in saves:
        try:
            save.handle.wait("durable")
            problem, step = None, save.step
        except CkptdError as error:
            if save.step != step:
                problem = error
    return problem


def await_turn(client: Client, handle: SaveHandle) -> None:
    """Blocks until a save is on the disk, save_timeout_s at most: a newer one of the same step would take its turn."""
    with contextlib.suppress(CkptdError):
        handle.wait("durable", staging_of(client).until() - time.monotonic())


def _may_be_rank_0() -> bool:
    """Before Lightning has told the ranks: by what launchers say."""
    known = LIGHTNING.module("lightning.fabric.utilities.rank_zero").rank_zero_only.rank
    return known == 0 and os.environ.get("NODE_RANK", "0") == "0"
