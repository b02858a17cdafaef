"""The storage reader: a checkpoint from this node's memory or from the store, by the ranges that DCP plans to read."""

import logging
import os
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor

from ckptd.shared.base.errors import RestoreError, UsageError
from ckptd.shared.files.integrity_key import chosen
from ckptd.shared.format.integrity import Integrity
from ckptd.shared.stores.kinds import absolute
from ckptd_client._load.checkpoint import Checkpoint, open_directory
from ckptd_client._load.foreign.load_from import kind_of
from ckptd_client._load.published import open_published
from ckptd_client._load.reader import Target
from ckptd_client._load.shared_read.planned import Assigned, Offer, Offered, assign, refuse_different
from ckptd_client._local.rank import Group
from ckptd_client._state.pickle import pickle_keys
from ckptd_client._state.replica_choice import notes_of, of_the_lowest, taken_of
from ckptd_client._state.reshard import Box, Saved, cover
from ckptd_client._state.strided import is_interleaving
from ckptd_client._state.tensors import copyable, is_tensor, shard_of
from ckptd_client.client import Client, find_of, staging_of
from ckptd_client.dcp._content import Content
from ckptd_client.dcp._leaves import archive
from ckptd_client.dcp._writer import step_of

log = logging.getLogger("ckptd_client")
_HINT = "CkptdReader(client), CkptdReader(path) or checkpoint_id="


class CkptdReader(StorageReader):
    """Storage reader of DCP: `dcp.load(state, storage_reader=CkptdReader(client))`. One for all loads, or one for each.

    Checks every block against its digest: no load succeeds with one that differs. A rank of a job of the same size gets
    its own plain tensors and values back, else those of the lowest rank. It gets back the replicas that it saved in
    full only where all of the state is held as it was saved.

    Args:
        source: An open client of all ranks that load, for the newest checkpoint, or that of `step`, by the nearest
            route. Or the directory of a committed checkpoint, or one in which ckptd published it for a trainer: this
            needs no daemon. A `checkpoint_id` given to `dcp.load` is such a directory, or ends in the step.
        step: The step to load. Default: the newest.
        allow_pickle: Keys of values that may be unpickled, which runs code of their author. Added to those of the
            client.
        integrity: As for `connect`, for a directory. Default: that of the client, or of the environment.
        integrity_key_file: As for `connect`.

    Raises:
        UsageError: An argument is wrong.
    """

    def __init__(
        self,
        source: Client | str | os.PathLike[str] = "",
        *,
        step: int | None = None,
        allow_pickle: Sequence[str] = (),
        integrity: str | None = None,
        integrity_key_file: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(source, Client | str | os.PathLike):
            text = f"CkptdReader takes an open client or a directory, not {type(source).__name__}"
            raise UsageError(text, hint=_HINT)
        own = staging_of(source).pickle_keys.patterns if isinstance(source, Client) else ()
        self._pickle_keys = pickle_keys([*own, *pickle_keys(allow_pickle).patterns])
        self._how = "connect({})" if isinstance(source, Client) else "CkptdReader(path, {})"  # to allow more
        self._client = source if isinstance(source, Client) else None
        self._directory = None if isinstance(source, Client) else os.fspath(source) or None
        own_integrity = staging_of(source).integrity if isinstance(source, Client) else None
        said = integrity is not None or integrity_key_file is not None
        self._integrity = own_integrity if own_integrity and not said else chosen(integrity, integrity_key_file)
        self._step = step
        self._checkpoint: Checkpoint | None = None
        self._content: Content | None = None
        self._offered: Offered | None = None  # to read together with other ranks, without a client
        self._end_offer: Callable[[], object] = lambda: None  # also at the end of this reader
        self._notes: list[str] = []

    @property
    def notes(self) -> list[str]:
        """Notes on the checkpoint that the last load found; each was logged as a warning too."""
        return list(self._notes)

    @property
    def step(self) -> int | None:
        """Step of the checkpoint that the last load found."""
        return self._checkpoint.save.step if self._checkpoint is not None else None

    @property
    def tier(self) -> str | None:
        """Where the last load found it: 'arena' or 'pfs'."""
        return str(self._checkpoint.tier) if self._checkpoint is not None else None

    def close(self) -> None:
        """Closes the files of a load that failed before it read them; so does the next load. Idempotent."""
        self._offered = None
        self._end_offer()
        if self._checkpoint is not None:
            self._checkpoint.close()

    # --- what DCP calls, in this order

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a directory."""
        return os.path.isdir(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """What to load. Raises UsageError for text that is neither a directory nor names a step."""
        if checkpoint_id is None:
            return
        if self._client is not None and not os.path.isdir(checkpoint_id):
            self._step = step_of(checkpoint_id)
        else:
            self._directory = os.fspath(checkpoint_id)

    def read_metadata(self, *_args: Any, **_options: Any) -> Metadata:
        """Finds the checkpoint. With a client a round of all ranks. Raises RestoreError when there is none.

        No parameter is called kwargs: DCP would take that for leave to go on without the other ranks after an error.
        """
        self.close()
        if self._directory is not None:
            self._checkpoint = _opened(self._directory, self._integrity)
        elif self._client is not None:
            self._checkpoint = find_of(self._client, self._step)
        else:
            raise UsageError("nothing to read from", hint=_HINT)
        try:
            return self._described(self._checkpoint)
        except BaseException:
            self.close()  # other ranks do not wait for this one
            raise

    def _described(self, found: Checkpoint) -> Metadata:
        rank, world_size = self._group.rank, self._group.world_size
        self._content = Content(found, rank if world_size == found.world_size else 0, world_size)
        doubts = [f"step {found.save.step}: {text}" for text in found.doubts] if self._directory is not None else []
        self._notes = []
        self._say([*found.notes, *doubts], rank)
        return self._content.metadata

    def _say(self, notes: list[str], rank: int) -> None:
        """Takes notes, and has rank 0 log them."""
        assert self._checkpoint is not None  # noqa: S101 - read_metadata made it
        self._notes += notes
        for note in notes if rank == 0 else ():
            log.warning("ckptd: warning: step %d is loaded, but %s", self._checkpoint.save.step, note)

    @property
    def _group(self) -> Group:
        """Of the ranks that load: the client's, else torch.distributed's."""
        if self._client is not None:
            return self._client.group
        dist = torch.distributed
        alone = not (dist.is_available() and dist.is_initialized())
        return Group(0, 1, "") if alone else Group(dist.get_rank(), dist.get_world_size(), "")

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """With what the ranks need of each other to read a directory together; a client's ranks know it."""
        records = self._checkpoint.records if self._checkpoint is not None else None
        group = self._group
        if self._directory is None or records is None or group.world_size == 1:
            return plan
        self._offered = Offered(records, group, self._integrity)
        self._end_offer = weakref.finalize(self, self._offered.close)  # once called it keeps nothing
        return replace(plan, storage_data=self._offered.offer)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """With the part of each. Raises RestoreError where ranks found different checkpoints."""
        offers = [plan.storage_data for plan in plans if isinstance(plan.storage_data, Offer)]
        try:
            refuse_different(offers)  # also where some say nothing
        except BaseException:
            self.close()  # no rank reads what this one offers
            raise
        if len(offers) < len(plans) and self._directory is not None and len(plans) > 1:
            text = "ckptd: warning: %d of %d ranks do not say which checkpoint they found, so each reads by itself: %s"
            log.warning(text, len(plans) - len(offers), len(plans), "the planner must pass storage_data on")
        if not 1 < len(offers) == len(plans):
            return plans
        parts = assign(offers, os.urandom(8).hex())
        return [replace(plan, storage_data=part) for plan, part in zip(plans, parts, strict=True)]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Reads the ranges of the plan. Raises DamagedError that names file and block."""
        try:
            self._take_part(plan)
            fills = self._read(plan, planner)
        finally:
            if self._checkpoint is not None:
                self._checkpoint.leave()
            self._read_to_the_end()
        for fill in fills:
            fill.finish(planner)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    def _take_part(self, plan: LoadPlan) -> None:
        """Enters the read of all ranks, if there is one: from here on this rank says when it leaves."""
        offered, part = self._offered, plan.storage_data
        if offered is not None and self._checkpoint is not None and isinstance(part, Assigned):
            self._checkpoint.read_with(offered.participants(part).__enter__())

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> "list[_Fill]":
        checkpoint, content = self._checkpoint, self._content
        assert checkpoint is not None and content is not None  # noqa: S101, PT018 - read_metadata made them
        interleaved = _interleaved(planner, content)  # DCP takes the shard of one for one run of rows
        fills: list[_Fill] = [_OfBoxes(name, tensor) for name, tensor in interleaved.items()]
        for item in plan.items:
            if item.dest_index.fqn in interleaved:
                continue
            if item.type == LoadItemType.BYTE_IO:
                name = item.storage_index.fqn
                planner.load_bytes(item, archive(content.leaf(name), name, self._pickle_keys, self._how))
            else:
                fills.append(_OfItem(item, planner))
        wanted: dict[str, list[Box]] = {}
        for fill in fills:
            wanted.setdefault(fill.name, []).extend(fill.boxes)
        saved = content.boxes(wanted)
        state = getattr(planner, "state_dict", None)
        lowest = _of_the_lowest(content, state, self._group.world_size) & wanted.keys()
        targets: dict[int, list[Target]] = {}
        for fill in fills:
            dtype, prefer = content.dtype_of(fill.name), None if fill.name in lowest else content.like
            for rank, target in fill.targets(saved[fill.name], dtype, prefer):
                targets.setdefault(rank, []).append(target)
        checkpoint.read_all(targets)
        taken = taken_of(lowest, saved, _Named())
        self._say(notes_of(taken, checkpoint.replicas), self._group.rank)
        return fills

    def _read_to_the_end(self) -> None:
        """A load asks once for all that it wants."""
        self.close()


class _Fill:
    """Parts of one tensor, and the memory that they go to. boxes: where these parts lie in the tensor."""

    def __init__(self, name: str, boxes: list[Box], tensors: list[torch.Tensor]) -> None:
        self.name, self.boxes, self.tensors = name, boxes, tensors
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def targets(self, saved: Collection[Saved], dtype: torch.dtype, prefer: int | None) -> Iterator[tuple[int, Target]]:
        """With the rank whose image is read. Raises RestoreError where the checkpoint has not all of a part."""
        for box, tensor in zip(self.boxes, self.tensors, strict=True):
            found = cover(box, saved, prefer=prefer)
            if found is None:
                raise RestoreError(f"{self.name!r} is not whole in the checkpoint", hint="load an older step")
            read = tensor if _is_read_in_place(tensor, dtype) else torch.empty(box.sizes, dtype=dtype)
            if read is not tensor:
                self._copies.append((tensor, read))
            yield from ((run.rank, Target(run.source, run.nbytes, read.data_ptr() + run.target)) for run in found)

    def finish(self, _planner: LoadPlanner) -> None:
        """After the bytes are in. A tensor of another dtype is converted, as DCP's own readers do."""
        with torch.no_grad():
            for tensor, read in self._copies:
                alike = tensor.dtype == read.dtype
                (copyable(tensor) if alike else tensor).copy_(copyable(read) if alike else read)


class _OfItem(_Fill):
    """What one item of a load plan asks for."""

    def __init__(self, item: ReadItem, planner: LoadPlanner) -> None:
        tensor, sizes = planner.resolve_tensor(item).detach(), tuple(item.lengths)
        if tuple(tensor.shape) != sizes:
            text = f"the planner gives {list(tensor.shape)} for {list(sizes)} of {item.dest_index.fqn!r}"
            raise RestoreError(text, hint="resolve_tensor must return what create_local_plan asked for")
        chunk = item.storage_index.offset or [0] * len(sizes)
        offsets = tuple(a + b for a, b in zip(chunk, item.storage_offsets, strict=True))
        super().__init__(item.storage_index.fqn, [Box(offsets, sizes)], [tensor])
        self._item = item

    def finish(self, planner: LoadPlanner) -> None:
        """And the planner gets the tensor."""
        super().finish(planner)
        planner.commit_tensor(self._item, self.tensors[0])


class _OfBoxes(_Fill):
    """A DTensor of the state whose shard is of several boxes, which DCP's items do not know."""

    def __init__(self, name: str, tensor: DTensor) -> None:
        chunks = shard_of(tensor, repr(name)).chunks
        super().__init__(name, [Box(*chunk.box) for chunk in chunks], [chunk.local.detach() for chunk in chunks])


def _is_read_in_place(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    plain = tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.dtype == dtype
    return plain and not tensor.is_conj() and not tensor.is_neg()


class _Named(dict[str, str]):
    """Names in quotes."""

    def __missing__(self, name: str) -> str:
        return repr(name)


def _of_the_lowest(content: Content, state: Any, world_size: int) -> set[str]:
    """Names of what every rank reads of the lowest: all that replicas saved in full, if the planner has no state."""
    here = {name: how for name, how in content.alike.items() if name in content.tensors}
    if not isinstance(state, dict):
        return set(here)
    return of_the_lowest(here, {name: value for name, value in state.items() if is_tensor(value)}, world_size)


def _interleaved(planner: LoadPlanner, content: Content) -> dict[str, DTensor]:
    """What to fill box by box: of planners that keep the names of the state."""
    state = getattr(planner, "state_dict", None)
    values = state.items() if isinstance(state, dict) else ()
    return {
        name: value
        for name, value in values
        if isinstance(value, DTensor) and name in content.tensors and is_interleaving(value)
    }


def _opened(directory: str, integrity: Integrity) -> Checkpoint:
    """A committed checkpoint of ckptd. Raises UsageError for what is none, CkptdError, OSError."""
    path = absolute(directory)
    published = open_published(path, integrity)
    if published is not None:
        return published
    kind = kind_of(path, "CkptdReader({!r})")
    if kind == "dcp":
        hint = f"dcp.load(state, checkpoint_id={path!r}), or client.load_from({path!r}, state)"
        raise UsageError(f"{path} is a directory of DCP's, not ckptd's", hint=hint)
    if kind == "safetensors":
        text = f"{path} holds no checkpoint of ckptd"
        raise UsageError(text, hint="client.load_from(path, state) reads safetensors")
    return open_directory(directory, integrity=integrity)
