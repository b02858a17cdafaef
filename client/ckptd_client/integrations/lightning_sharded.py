"""Under Lightning's FSDP and ModelParallel strategies, whose ranks save a shard each. docs/lightning.md has an example.

``Trainer(strategy=CkptdModelParallelStrategy(ckptd={"job": ..., "store": ...}))``: a checkpoint is staged through the
plug-ins for torch.distributed.checkpoint and training goes on; its directory appears, whole, when the daemon has
drained it, and is what Lightning itself reads.
"""

import contextlib
import io
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ckptd.shared.base.errors import CkptdError, RestoreError, UsageError
from ckptd.shared.protocol.messages import End
from ckptd.shared.protocol.publication import Publication
from ckptd_client._save.unchanged import is_still
from ckptd_client.client import Client, staging_of
from ckptd_client.dcp import CkptdSavePlanner, CkptdWriter
from ckptd_client.handle import SaveHandle
from ckptd_client.integrations._kit.dcp_reader import reader_for
from ckptd_client.integrations._kit.drafts import (
    draft_in_place,
    draft_of,
    drafts_in,
    oldest_first,
    origin_of,
    publication_of,
)
from ckptd_client.integrations._kit.options import connect_with
from ckptd_client.integrations._kit.places import Places
from ckptd_client.integrations._kit.ranks import from_rank_0
from ckptd_client.integrations.lightning import LIGHTNING, await_turn

log = logging.getLogger("ckptd_client")

_STRATEGIES = "lightning.pytorch.strategies"
_META = "meta.pt"  # what Lightning takes a directory for a sharded checkpoint by
# Where its loaders find what reads tensors: FSDP's asks torch's package for a reader.
_LOADERS = (
    "lightning.fabric.strategies.model_parallel",
    "lightning.pytorch.strategies.fsdp",
    "torch.distributed.checkpoint",
)


class _Sharded:
    """What both strategies do differently. A fit, or a load, connects; teardown waits until all is drained."""

    _ckptd_model_key = "state_dict"

    def __init__(self, *args: Any, ckptd: Mapping[str, Any] | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ckptd_settings = dict(ckptd or {})
        self._ckptd: _Saves | None = None
        self.tier: str | None = None
        """Where the last load found it: 'arena', 'pfs', None for a checkpoint that is none of ckptd's."""

    @property
    def handle(self) -> SaveHandle | None:
        """The newest save's handle on this rank, None before the first."""
        return self._ckptd.writer.handle if self._ckptd is not None else None

    def last(self: Any, folder: str | os.PathLike[str]) -> str | None:
        """For ``trainer.fit(ckpt_path=strategy.last(folder))``: the newest checkpoint of ckptd's there, drained or not.

        None: there is none. Collective; sets up the process group. Brings into the folder what was drained when its
        trainer had ended already.
        """
        if not dist.is_initialized():
            self._ckptd_set_up()
        saves = self._ckptd_saves()
        found: str | None = from_rank_0(lambda: saves.newest(os.path.abspath(folder)))
        return found

    def setup(self: Any, trainer: Any) -> None:
        """As Lightning's; connects, so that what is wrong is raised before the training. Collective."""
        stock: Any = super()
        stock.setup(trainer)
        if self._ckptd_is_sharded and trainer.state.fn == "fit":
            self._ckptd_saves()

    def save_checkpoint(self: Any, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Stages the checkpoint. Training may go on, and change every tensor, when it returns. Collective.

        Outside of a training that runs it blocks until the directory is there. Raises CheckpointException for what
        cannot be saved; an operational fault is logged.
        """
        stock: Any = super()
        if not self._ckptd_is_sharded:
            stock.save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise UsageError("storage_options have no meaning here", hint="leave them out")
        saves = self._ckptd_saves()
        place = os.path.abspath(os.fspath(self.broadcast(filepath)))
        step = int(checkpoint.get("global_step", 0))
        state = {self._ckptd_model_key: checkpoint.pop("state_dict")}
        state |= {f"optimizer_{i}": each for i, each in enumerate(checkpoint.pop("optimizer_states", []))}
        if self.reduce_boolean_decision(saves.is_staged(step, state)):
            saves.show_again(place, checkpoint)
        else:
            saves.save(state, place, self.broadcast(saves.client.free_step(step)), checkpoint)
        if self.lightning_module.trainer.state.status != "running":
            saves.settle()
            self.barrier()

    def load_checkpoint(self: Any, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """From memory while the node has it, also when its directory is still to appear. Collective."""
        stock: Any = super()
        saves = self._ckptd_saves()
        place = os.path.abspath(os.fspath(self.broadcast(checkpoint_path)))
        where = from_rank_0(lambda: saves.source(place))
        try:
            with _reading(saves.client, where, place) as self.tier:
                loaded: dict[str, Any] = stock.load_checkpoint(where, weights_only)
                self.barrier()
        finally:
            if where != place and saves.places is not None:
                shutil.rmtree(where, ignore_errors=True)
        return loaded

    def remove_checkpoint(self: Any, filepath: Any) -> None:
        """Removes the directory, when a save that was asked for before is there: nothing undrained is touched."""
        places = self._ckptd_saves().places
        if places is not None:
            places.remove(os.path.abspath(os.fspath(filepath)))

    def on_train_end(self: Any) -> None:
        """Blocks until all is drained, so that every rank finds the same directories."""
        stock: Any = super()
        stock.on_train_end()
        if self._ckptd is not None:
            self._ckptd.settle()
            self.barrier()

    def teardown(self: Any) -> None:
        """Waits until all is drained, removes what was to be removed, and closes the client."""
        stock: Any = super()
        saves, self._ckptd = self._ckptd, None
        try:
            if saves is not None:
                saves.settle()
                saves.client.close()
        finally:
            stock.teardown()

    def _ckptd_saves(self) -> "_Saves":
        if self._ckptd is None:
            self._ckptd = _Saves(self._ckptd_settings)
        return self._ckptd


class CkptdModelParallelStrategy(_Sharded, LIGHTNING.base(_STRATEGIES, "ModelParallelStrategy")):  # type: ignore[misc]
    """A ModelParallelStrategy (FSDP2, tensor parallelism) that stages each rank's shards.

    With `save_distributed_checkpoint=False` it saves as without ckptd, or through `plugins=[CkptdCheckpointIO()]`.

    Args:
        ckptd: Arguments of `ckptd_client.connect`.
    """

    @property
    def _ckptd_is_sharded(self) -> bool:
        return bool(self._save_distributed_checkpoint)

    def _ckptd_set_up(self) -> None:
        self._setup_distributed()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Shards, where they lie: the one copy is made while they are staged."""
        stock: Any = super()
        found: dict[str, Any]
        found = get_model_state_dict(self.model) if self._ckptd_is_sharded else stock.lightning_module_state_dict()
        return found

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Shards, where they lie."""
        stock: Any = super()
        if not self._ckptd_is_sharded:
            whole: dict[str, Any] = stock.optimizer_state(optimizer)
            return whole
        return dict(get_optimizer_state_dict(self.model, getattr(optimizer, "_optimizer", optimizer)))


class CkptdFSDPStrategy(_Sharded, LIGHTNING.base(_STRATEGIES, "FSDPStrategy")):  # type: ignore[misc]
    """An FSDPStrategy that stages each rank's shards with `state_dict_type="sharded"`.

    With "full" it saves as without ckptd, or through `plugins=[CkptdCheckpointIO()]`.

    Args:
        ckptd: Arguments of `ckptd_client.connect`.
    """

    _ckptd_model_key = "model"

    @property
    def _ckptd_is_sharded(self) -> bool:
        return bool(self._state_dict_type == "sharded")

    def _ckptd_set_up(self) -> None:
        self.setup_environment()


class _Writer(CkptdWriter):
    """publication: where a save is to appear, once it is known which one it is. What that raises ends the save."""

    publication: Callable[[SaveHandle], Publication]

    def _publication(self, handle: SaveHandle) -> Publication:
        return self.publication(handle)


class _Saves:
    """The saves of one strategy, from its first use to its teardown."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.client: Client = connect_with(settings)
        self.writer = _Writer(self.client, wait=None, drain=True)
        self.places = Places(self.client) if self.client.group.rank == 0 else None
        self._of_step = -1  # Lightning's, of the newest save

    def is_staged(self, step: int, state: dict[str, Any]) -> bool:
        """Whether the newest save is of this very state, as of a best one before last.ckpt. Compares all bytes.

        A save of its own could take the turn of the one that waits for the store. When it is another state, of the same
        step, this blocks until the newest one has had its turn.
        """
        before, self._of_step = self._of_step, step
        handle = self.writer.handle
        if before != step or handle is None or handle.end not in (None, End.DURABLE):
            return False
        flat, _ = flatten_state_dict(state)
        if is_still(staging_of(self.client), handle.save_id, flat):
            return True
        await_turn(self.client, handle)
        return False

    def show_again(self, place: str, rest: dict[str, Any]) -> None:
        """Has the newest save appear at this place too."""
        handle = self.writer.handle
        if self.places is None or handle is None:
            return
        try:
            self.places.expect_too(draft_of(place, handle.save_id), _meta(rest), handle)
        except (OSError, CkptdError) as error:
            log.warning("ckptd: %s does not appear: %s", place, error)

    def save(self, state: dict[str, Any], place: str, step: int, rest: dict[str, Any]) -> None:
        """Stages the state for the place. rest: what goes into meta.pt, rank 0's. Collective."""

        def publication(handle: SaveHandle) -> Publication:
            draft = draft_of(place, handle.save_id)
            to = publication_of(self.client, draft)
            if self.places is not None:
                self.places.expect(draft, _meta(rest), handle)
            return to

        self.writer.publication = publication
        try:
            save(state, checkpoint_id=str(step), storage_writer=self.writer, planner=CkptdSavePlanner())
        except CheckpointException as error:
            faults = [fault for fault, _ in error.failures.values()]
            if not all(map(_is_operational, faults)):
                raise
            log.warning("ckptd: %s is not saved: %s", place, faults[0])

    def settle(self) -> None:
        """Blocks, on rank 0, until what was saved is there."""
        if self.places is not None:
            self.places.settle()

    # --- what only rank 0 looks for

    def newest(self, folder: str) -> str | None:
        """The place in the folder whose save is the newest."""
        assert self.places is not None  # noqa: S101 - rank 0
        self.places.finish(folder)
        found = {each.origin.save: each.draft for each in drafts_in(folder) if each.origin is not None}
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            origin, place = origin_of(os.path.join(folder, name)), os.path.join(folder, name)
            if origin is not None and not name.startswith("."):
                found[origin.save] = draft_in_place(place)
        places = oldest_first((save, draft.path, draft.place) for save, draft in found.items())
        return places[-1] if places else None

    def source(self, place: str) -> str:
        """The directory to load from: that at the place, or a copy of the draft of a newer one that is to appear there.

        Of the draft itself the daemon makes the place when it likes.
        """
        assert self.places is not None  # noqa: S101 - rank 0
        self.places.still()
        for origin, draft in reversed(drafts_in(os.path.dirname(place))):
            if draft.place == place and origin is not None and staging_of(self.client).has(origin.save):
                copy = tempfile.mkdtemp(prefix=".ckptd-load-", dir=os.path.dirname(place))
                try:
                    return shutil.copytree(draft.path, copy, dirs_exist_ok=True)
                except OSError:  # the daemon makes the place of it meanwhile
                    shutil.rmtree(copy, ignore_errors=True)
        return place


def _meta(rest: dict[str, Any]) -> dict[str, bytes]:
    buffer = io.BytesIO()
    torch.save(rest, buffer)
    return {_META: buffer.getvalue()}


def _is_operational(fault: BaseException) -> bool:
    return isinstance(fault, (CkptdError, OSError)) and not isinstance(fault, UsageError)


@contextlib.contextmanager
def _reading(client: Client, where: str, place: str) -> Iterator[str | None]:
    """Lightning's loaders call functions of their modules, and FSDP's makes a reader: the places to hand them another.

    Collective. Gives the tier. Nothing changes for a directory that is none of ckptd's.
    """
    reader = reader_for(client, where)
    if reader is None:
        if where != place:
            raise RestoreError(f"{place}: its checkpoint was lost before it was durable", hint="resume an older one")
        yield None
        return
    log.info("ckptd: %s is read from %s", place, reader.tier)

    stand_ins: dict[str, Any] = {
        "_distributed_checkpoint_load": lambda state, _path: load(state, storage_reader=reader),
        "FileSystemReader": lambda *_args, **_options: reader,
    }
    with contextlib.ExitStack() as undo:
        undo.callback(reader.close)
        for module in map(LIGHTNING.module, _LOADERS):
            for name in stand_ins.keys() & vars(module).keys():
                undo.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, stand_ins[name])
        yield reader.tier
