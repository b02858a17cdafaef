"""torch.distributed.checkpoint: in the loop, in a thread, in a process."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save

from bench.peers import Finish, Place
from bench.peers.files import Directories, sync
from bench.states import State

_TIMEOUT_S = 120.0


class _Dcp(Directories):
    """Runs its collectives in a separate group: in a thread they would mix with those of the training."""

    def __init__(self, place: Place) -> None:
        super().__init__(place, "__{rank}_*.distcp")
        self._group = dist.new_group(backend="gloo")


class Sync(_Dcp):
    """dcp.save in the loop; it syncs its files itself."""

    def save(self, state: State, step: int) -> Finish:
        """Writes and syncs."""
        dcp_save(state, checkpoint_id=self.directory(step), process_group=self._group)
        sync(self.directory(step))
        return lambda: None


class Async(_Dcp):
    """dcp.async_save with its defaults."""

    def save(self, state: State, step: int) -> Finish:
        """Stages in the call, writes in a thread."""
        upload = async_save(state, checkpoint_id=self.directory(step), process_group=self._group)
        return _finish(upload, self.directory(step))


class Reused(_Dcp):
    """The staging memory and the plan are kept between saves.

    process: a child writes, from shared memory. late: staged in a thread, which the optimizer's step waits for.
    """

    def __init__(self, place: Place, *, process: bool = False, late: bool = False) -> None:
        super().__init__(place)
        self._kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=process,
                use_async_staging=late,
                use_non_blocking_copy=False,
            )
        )
        self._staged: Future[None] | None = None

    def save(self, state: State, step: int) -> Finish:
        """Stages into the kept memory."""
        answer = async_save(
            state,
            checkpoint_id=self.directory(step),
            process_group=self._group,
            planner=DefaultSavePlanner(enable_plan_caching=True),
            async_stager=self._stager,
            async_checkpointer_type=self._kind,
        )
        if isinstance(answer, AsyncSaveResponse):
            self._staged = answer.staging_completion
            answer = answer.upload_completion
        return _finish(answer, self.directory(step))

    def before_step(self) -> None:
        """Waits for the stage."""
        staged, self._staged = self._staged, None
        if staged is not None:
            staged.result(_TIMEOUT_S)

    def close(self) -> None:
        """Frees the staging memory."""
        self._stager.close()


def _finish(upload: Any, directory: Path) -> Finish:
    """Waits for the upload, then syncs the files, in case it did not."""

    def finish() -> None:
        upload.result(_TIMEOUT_S)
        sync(directory)

    return finish
