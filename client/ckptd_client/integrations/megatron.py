"""Under Megatron core: strategies for ``megatron.core.dist_checkpointing``. docs/megatron.md has a complete example.

A save is staged in shared memory while core's ``save`` runs; its AsyncRequest is done when the daemon has drained it,
and only then do the finalize functions run: ours sees that the daemon has published it in the directory that core was
given, core's own then write metadata.json, the trainer's own the tracker. What core's stock load strategy finds in the
directory it reads without ckptd.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ckptd.shared.base.errors import UsageError
from ckptd_client.client import Client, staging_of
from ckptd_client.integrations._kit.dcp_reader import reader_for
from ckptd_client.integrations._kit.drafts import is_filled, origin_of
from ckptd_client.integrations._kit.framework import Framework
from ckptd_client.integrations._kit.staged import Content, Staged, stage

MEGATRON = Framework("Megatron core", "megatron-core", "0.15")
_CORE = "megatron.core.dist_checkpointing"
_TORCH = f"{_CORE}.strategies.torch"
_ASYNC = f"{_CORE}.strategies.async_utils"
_BACKEND, _VERSION = "torch_dist", 1  # what the directory looks like, so what core reads it with
_COMMON = "common.pt"  # written by core before the strategy is called, and not synced
_POLL_S = 0.1


class CkptdSaveStrategy(MEGATRON.base(_TORCH, "TorchDistSaveShardedStrategy")):  # type: ignore[misc]
    """Save strategy: `dist_checkpointing.save(state, directory, sharded_strategy=CkptdSaveStrategy(client))`.

    The main replica of each tensor writes it; wrap this strategy into FullyParallelSaveStrategyWrapper to divide the
    tensors among the replicas. Sharded objects are kept in ckptd's safe encoding; one that has none is refused unless
    `connect(allow_pickle=[...])` names its key. One save runs at a time: the next waits until the drain of the last has
    ended.

    Args:
        client: An open client of all ranks that save.
    """

    def __init__(self, client: Client) -> None:
        super().__init__(_BACKEND, _VERSION)
        if not isinstance(client, Client):
            text = f"CkptdSaveStrategy takes an open client, not {type(client).__name__}"
            raise UsageError(text, hint="CkptdSaveStrategy(ckptd_client.connect(job=..., store=...))")
        self._client = client
        self._last: Staged | None = None

    @property
    def handle(self) -> Any:
        """The handle of the newest save on this rank, None before the first."""
        return self._last.handle if self._last is not None else None

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, *_args: Any, **_options: Any) -> Any:
        """Stages the state and returns an AsyncRequest; the state may be changed at once. Collective.

        A fault on one rank does not raise here: the first finalize function of the request raises it, on all ranks.
        """
        if self._last is not None:
            self._last.settle()
        directory = os.fspath(checkpoint_dir)
        content = partial(self._content, sharded_state_dict)
        self._last = staged = stage(self._client, content, directory, synced=(_COMMON,))
        return MEGATRON.module(_ASYNC).AsyncRequest(staged.wait_fn, staged.wait_args, [staged.land])

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """Saves, and returns when the checkpoint is durable and published in the directory. Collective."""
        self.async_save(sharded_state_dict, checkpoint_dir).execute_sync()

    def _content(self, sharded_state_dict: Any) -> Content:
        """What this rank saves, by core's own keys. A sharded object is kept as core would: a list of what it holds."""
        core = MEGATRON.module(_TORCH)
        shards, _, _ = core._replace_state_dict_keys_with_sharded_keys(  # noqa: SLF001 - as its other strategies do
            sharded_state_dict, self.keep_only_main_replica
        )
        objects = MEGATRON.module(f"{_CORE}.mapping").ShardedObject
        tensors = {key: found for key, found in shards.items() if not isinstance(found[0], objects)}
        for key, found in tensors.items():
            if getattr(found[0], "flattened_range", None) is not None:
                raise UsageError(f"{key!r} is a flattened range", hint="choose a fully reshardable optimizer format")
        whole = {key: [one.data for one in found] for key, found in shards.items() if key not in tensors}
        return Content(core.mcore_to_pyt_state_dict(tensors, is_loading=False), whole)


class CkptdLoadStrategy(MEGATRON.base(_TORCH, "TorchDistLoadShardedStrategy")):  # type: ignore[misc]
    """Load strategy: `dist_checkpointing.load(state, directory, CkptdLoadStrategy(client))`, from memory if there.

    Reads of ckptd's checkpoints are checked against their digests. It reads any other directory as core does.

    Args:
        client: An open client of all ranks that load.
    """

    def __init__(self, client: Client) -> None:
        super().__init__()
        self._client = client
        self.tier: str | None = None
        """Where the last load found it: 'arena', 'pfs', None for a directory that is none of ckptd's."""

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        """Returns what core's own strategy returns. Collective; begins a new incarnation.

        Raises IntegrityError for a client with a key where nothing proves the files of the directory.
        """
        reader = reader_for(self._client, os.fspath(checkpoint_dir))
        self.tier = reader.tier if reader is not None else None
        if reader is None:
            return super().load(sharded_state_dict, checkpoint_dir)
        with _reading_through(reader):
            return super().load(sharded_state_dict, checkpoint_dir)


@contextlib.contextmanager
def _reading_through(reader: Any) -> Iterator[None]:
    """core's strategy makes its reader by a function of its module, which is the only place to hand it another."""
    core = MEGATRON.module(_TORCH)
    own: Callable[..., Any] = core._get_filesystem_reader  # noqa: SLF001 - see above
    core._get_filesystem_reader = lambda *_args, **_options: reader  # noqa: SLF001
    try:
        yield
    finally:
        core._get_filesystem_reader = own  # noqa: SLF001
        reader.close()


def finish(client: Client, checkpoint_dir: str | os.PathLike[str], timeout_s: float = 600.0) -> bool:
    """Returns whether core can load the directory.

    If the trainer ended before its save was durable, it publishes the directory first. One rank calls it, before the
    others load.

    Args:
        client: An open client.
        checkpoint_dir: The directory that core was given.
        timeout_s: Most seconds to wait for a drain that may still come.

    Raises:
        DamagedError: The directory has no checkpoint, or one that is not proved as the client asks for.
    """
    directory = os.fspath(checkpoint_dir)
    core = MEGATRON.module(f"{_CORE}.core")
    if core.check_is_distributed_checkpoint(directory):
        return True
    origin = origin_of(directory)
    if origin is None or not origin.is_of(staging_of(client).job):
        return False
    deadline = time.monotonic() + timeout_s
    while not is_filled(client, directory, origin):
        if time.monotonic() > deadline or not staging_of(client).has(origin.save):
            return False
        time.sleep(_POLL_S)
    core.save_config(core.CheckpointingConfig(_BACKEND, _VERSION), directory)
    return True
