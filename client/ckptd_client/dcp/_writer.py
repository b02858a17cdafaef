"""The storage writer: what dcp.save plans goes into this node's memory, and from there wherever ckptd takes it."""

import functools
import os
import re
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor

from ckptd.shared.base.errors import SaveFailedError, UsageError
from ckptd.shared.base.ids import SaveId, parse_dirname
from ckptd.shared.format.layout import VERSION, Leaf, Leaves, encode_leaves
from ckptd.shared.format.replica_attestations import NOT_COMPARED, Attestation
from ckptd.shared.protocol.messages import Milestone
from ckptd.shared.protocol.publication import Publication
from ckptd.shared.stores.kinds import absolute
from ckptd_client._connect import connect
from ckptd_client._daemon.settings import as_step
from ckptd_client._image.segment_plan import Plain
from ckptd_client._local.save_record import SaveRecord, check_milestone
from ckptd_client._save import compared
from ckptd_client._save.segment import Segment
from ckptd_client._state.replica_slices import as_not_binding
from ckptd_client._state.strided import is_interleaving
from ckptd_client._state.tensors import shard_of
from ckptd_client.client import Client, staging_of
from ckptd_client.dcp._alike import UNKNOWN, Alike, answer, items_of, streams_of, tell
from ckptd_client.dcp._items import ItemPlans, paths_of, resolved, spread_of
from ckptd_client.dcp._leaves import own_leaves
from ckptd_client.dcp._staged import Staged, check_unstaged
from ckptd_client.handle import SaveHandle, handle_of

_NUMBER = re.compile(r"(\d+)\D*\Z")


def _of_a_path(path: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with store and job of a job's directory. Raises UsageError for a path that has not both."""
    store, job = os.path.split(absolute(path))
    twice = sorted({"store", "job"} & settings.keys())
    if twice:
        raise UsageError(f"a path and {', '.join(twice)}: the path names both", hint=f"CkptdWriter({path!r})")
    if not path or not job:
        text = f"CkptdWriter takes the directory of a job, STORE/JOB, not {path!r}"
        raise UsageError(
            text, hint="CkptdWriter('/scratch/ckpt/my-run'), and checkpoint_id='...-100' for dcp.save's step"
        )
    return {**settings, "store": store, "job": job}


class CkptdWriter(StorageWriter):
    """Storage writer of DCP: `dcp.save(state, storage_writer=CkptdWriter(client))`. One for all saves, or one for each.

    As DCP has it, a fault on one rank is a CheckpointException on all ranks, and the save ends on all.

    Args:
        client: An open client of all ranks that save (one per process), or the directory of a job, STORE/JOB, as DCP's
            own writer takes a path. Without a client the writer connects (collective), and `close` closes that client.
        step: Step of the next save. Default: the number that `checkpoint_id` of the save ends in, else one above the
            last.
        wait: What `dcp.save`, or the future of `dcp.async_save`, waits for: "staged" (in memory on all ranks),
            "durable", or None for nothing.
        drain: True makes each save durable whatever `drain_every` says, as `wait="durable"` does.
        connect_settings: Arguments of `ckptd_client.connect`, only without a client.

    Raises:
        UsageError: An argument is wrong; with a path, also what `connect` raises.
    """

    def __init__(
        self,
        client: Client | str | os.PathLike[str] | None = None,
        *,
        step: int | None = None,
        wait: str | None = "staged",
        drain: bool = False,
        **connect_settings: Any,
    ) -> None:
        super().__init__()
        if isinstance(client, str | os.PathLike):
            connect_settings, client = _of_a_path(os.fspath(client), connect_settings), None
        if client is not None and not isinstance(client, Client):
            text = f"CkptdWriter takes an open client or a path, not {type(client).__name__}"
            raise UsageError(
                text, hint="CkptdWriter(ckptd_client.connect(job=..., store=...)), or CkptdWriter('STORE/JOB')"
            )
        if client is not None and connect_settings:
            raise UsageError(f"a client and settings for another: {sorted(connect_settings)}", hint="give one of them")
        self._wait = check_milestone(wait) if wait is not None else None
        self._owned = client is None
        self._client = connect(**connect_settings) if client is None else client
        self._staging = staging_of(self._client)
        self._step = None if step is None else as_step(step)
        self._drain = drain or self._wait is Milestone.DURABLE
        self._plans = ItemPlans()
        self._staged: list[Staged] = []
        self._coordinates = False
        self._handle: SaveRecord | None = None
        self._open = False  # begun, and neither handed over nor given up
        self._refusal: UsageError | None = None  # of the checkpoint_id
        self._save: SaveId | None = None  # named, and to be begun
        self._current: Staged | None = None
        self._segment: Segment | None = None
        self._leaves: dict[str, Leaf] = {}
        self._attestations: tuple[Attestation, ...] = ()

    @property
    def client(self) -> Client:
        """The client that it writes through."""
        return self._client

    @property
    def handle(self) -> SaveHandle | None:
        """The newest save's handle on this rank, None before the first."""
        return handle_of(self._handle) if self._handle is not None else None

    def close(self) -> None:
        """Closes the client if this writer made it."""
        if self._owned:
            self._client.close()

    def add_staged(self, staged: Staged) -> None:
        """The stager's: the next save that DCP begins is this one."""
        self._staged.append(staged)

    def _next_staged(self) -> Staged | None:
        """What was staged first and somebody still holds: what went to another writer is gone with its save."""
        self._staged = [staged for staged in self._staged if staged.waits]
        if not self._staged:
            return None
        staged = self._staged.pop(0)
        staged.taken_by(self)
        return staged

    # --- what DCP calls, in this order

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it ends in a number, the step."""
        return _NUMBER.search(os.fspath(checkpoint_id)) is not None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A save follows, of the step that checkpoint_id ends in. What is wrong with that storage_meta raises.

        Raised here it would be one rank's error, and the staged state would go to the next save.
        """
        self._refusal = None
        if checkpoint_id is not None:
            try:
                self._step = step_of(checkpoint_id)
            except UsageError as error:
                self._refusal = error

    def storage_meta(self) -> StorageMeta | None:
        """DCP's first question on every rank, which gives the save its name.

        It begins only with write_data: of a fault while they plan DCP tells the planners' ranks, but no writer.
        """
        self._end_last()
        self._current = staged = self._next_staged()
        step, self._step = self._step, None
        self._segment, self._leaves = (staged.segment, staged.leaves) if staged else (None, {})
        self._attestations = ()
        number = staged.number if staged else self._staging.numbers.count()
        for error in (self._refusal, staged.error if staged else None):
            if error is not None:
                self._end_last()
                raise error
        self._save = self._staging.numbers.name(number, step)
        return None

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **kwargs: Any) -> None:
        """Remembers the role. Raises UsageError unless DCP's ranks are the client's."""
        self._coordinates = is_coordinator
        group, rank = self._client.group, kwargs.get("rank", self._client.group.rank)
        if rank != group.rank:
            text = f"rank {rank} of the process group is rank {group.rank} of {group.world_size} in ckptd"
            raise UsageError(text, hint="save with a process group of all ranks that called connect, in their order")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """With what this rank has, before DCP leaves it to another."""
        return plan if self._current is not None else tell(plan, self._staging.is_own)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """With what ranks have in common. Raises UsageError unless they are of all the client's ranks."""
        if len(plans) != self._client.group.world_size:
            text = f"dcp.save runs on {len(plans)} of the job's {self._client.group.world_size} ranks"
            hint = "every rank calls it, with a process group of all that called connect (one rank alone: {})"
            raise UsageError(text, hint=hint.format("connect(alone=True)"))
        return plans if self._current is not None else answer(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """The one copy, into shared memory. The coordinator's part is handed over by finish, when all have theirs."""
        try:
            self._begin()
            if self._current is not None:
                self._current.check(planner)
            else:
                check_unstaged(self._client, planner)
                self._segment = self._fill(plan.items, planner)
            self._attestations = self._compared(plan, planner)
            if not self._coordinates:
                self._seal({})
        except BaseException as error:
            self._give_up(error)
            raise
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result([self._result(item) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:  # noqa: ARG002 - the layouts say it
        """On the coordinator, when every rank has written. Waits for the milestone asked for."""
        if self._open:  # else not the coordinator, in a save without collectives
            try:
                found = {r.index.fqn: r.storage_data for part in results for r in part if r.storage_data is not None}
                self._seal(found)
            except BaseException as error:
                self._give_up(error)
                raise
        if self._wait is not None and self._handle is not None:
            self._handle.wait(self._wait)

    # --- the two steps

    def _begin(self) -> None:
        assert self._save is not None  # noqa: S101 - storage_meta named it
        self._handle = None  # not the last save's, should this one not begin
        self._handle = self._staging.open(self._save)
        self._open = True
        self._handle.stall_s = self._current.seconds if self._current is not None else 0.0

    def _end_last(self) -> None:
        """Gives up a save that DCP began and, because of another rank, did not end."""
        if self._open:
            self._give_up(SaveFailedError("another rank could not save"))
        elif self._segment is not None:  # staged, and ended before it had a handle
            self._staging.release(self._segment)
            self._segment = None

    def _give_up(self, error: BaseException) -> None:
        self._open = False
        segment, self._segment = self._segment, None
        if segment is not None:
            self._staging.release(segment)
        if self._handle is not None:
            self._staging.give_up(self._handle, error)

    def _fill(self, items: Sequence[WriteItem], planner: SavePlanner) -> Segment:
        began = time.perf_counter()
        written = [item for item in items if item.type != WriteItemType.BYTE_IO]
        specs, tensors = resolved(written, (_tensor(planner, item) for item in written))
        self._leaves = own_leaves(planner, items, self._staging.pickle_keys)
        state = getattr(planner, "state_dict", None)
        names = [*state] if isinstance(state, dict) else [item.index.fqn for item in items]
        paths = paths_of(names, getattr(planner, "mappings", None))
        group = self._client.group
        proof = self._staging.integrity
        spread = spread_of(planner, specs, group.rank)
        plan = self._plans.plan(specs, paths, spread, rank=group.rank, world_size=group.world_size, integrity=proof)
        segment = self._staging.fill(plan, tensors, self._plain({}).nbytes, owner=self)
        if self._handle is not None:
            self._handle.stall_s = time.perf_counter() - began
        return segment

    def _seal(self, others: dict[str, Leaf]) -> None:
        segment, self._segment = self._segment, None
        assert segment is not None and self._handle is not None  # noqa: S101, PT018 - write_data filled it
        plain, to = self._plain(others), self._publication(handle_of(self._handle))
        self._staging.seal(segment, self._handle, plain, drain=self._drain, publication=to)
        self._open = False

    def _publication(self, _handle: SaveHandle) -> Publication | None:
        """The other place where a trainer wants the save; equal on all ranks. Its exceptions end the save."""
        return None

    def _plain(self, others: dict[str, Leaf]) -> Plain:
        """others: plain values that only other ranks have; stock readers look for them in rank 0's."""
        objects = compared.stock_objects(self._staging, others | self._leaves)
        return Plain(encode_leaves(Leaves(VERSION, self._leaves)), objects, lambda: self._attestations)

    def _compared(self, plan: SavePlan, planner: SavePlanner) -> tuple[Attestation, ...]:
        """This rank's word of what others hold too. Blocks while it is read.

        It is only reported: where replicas differ DCP has dealt their tensors out all the same, and will next time.
        """
        assert self._handle is not None  # noqa: S101 - begun
        if self._current is not None:
            assert self._segment is not None  # noqa: S101 - staged
            return compared.attestation_of_segment(self._staging, self._segment, self._handle, drain=self._drain)
        if self._client.group.world_size == 1:
            return ()
        alike = plan.storage_data if isinstance(plan.storage_data, Alike) else UNKNOWN
        items = items_of(alike)
        if items is None:
            return (NOT_COMPARED,)
        streams, values = streams_of(alike, items, lambda item: _tensor(planner, item))
        attestations = compared.attestation_of_streams(self._staging, streams, values, self._handle, drain=self._drain)
        return as_not_binding(attestations) + ((NOT_COMPARED,) if alike.unseen else ())

    def _result(self, item: WriteItem) -> WriteResult:
        nbytes = item.tensor_storage_size() or 0
        leaf = self._leaves.get(item.index.fqn) if item.type == WriteItemType.BYTE_IO else None
        return WriteResult(index=item.index, size_in_bytes=nbytes or len(leaf.data if leaf else b""), storage_data=leaf)


def _tensor(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    whole = (getattr(planner, "state_dict", None) or {}).get(item.index.fqn)
    if isinstance(whole, DTensor) and is_interleaving(whole):
        _check_box(item, whole)
    data = planner.resolve_data(item)
    if not isinstance(data, torch.Tensor):
        raise UsageError(f"the planner gives no tensor for {item.index.fqn!r}", hint="return one from resolve_data")
    return data


def _check_box(item: WriteItem, whole: DTensor) -> None:
    """Raises UsageError when DCP has not understood which rows this rank has."""
    planned = item.tensor_data.chunk if item.tensor_data is not None else None
    box = (tuple(planned.offsets), tuple(planned.sizes)) if planned is not None else ((), ())
    if 0 not in box[1] and box not in [chunk.box for chunk in shard_of(whole, repr(item.index.fqn)).chunks]:
        text = f"{item.index.fqn!r} has other rows on this rank than the planner says: its placements interleave"
        raise UsageError(text, hint="dcp.save(..., planner=CkptdSavePlanner())")


def step_of(checkpoint_id: str | os.PathLike[str]) -> int:
    """The number that a checkpoint_id ends in. Raises UsageError when there is none."""
    name = os.path.basename(os.fspath(checkpoint_id).rstrip("/"))
    match, own = _NUMBER.search(name), parse_dirname(name)
    if own is not None:
        return own[0]
    if match is None:
        raise UsageError(f"checkpoint_id {os.fspath(checkpoint_id)!r} names no step", hint='such as "step-100"')
    return int(match[1])


def refuse_process_saves() -> None:
    """From now on such a call with a CkptdWriter raises UsageError. Releases of torch without that process: nothing."""
    try:
        from torch.distributed.checkpoint import _async_process_executor as executors  # noqa: PLC0415
    except ImportError:
        return
    kind = getattr(executors, "_ProcessBasedAsyncCheckpointExecutor", None)
    plain = getattr(kind, "execute_save", None)
    if kind is None or plain is None or getattr(plain, "refuses_ckptd", False):
        return

    @functools.wraps(plain)
    def execute_save(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(given, CkptdWriter) for given in (*args, *kwargs.values())):
            text = "async_save with AsyncCheckpointerType.PROCESS gives the CkptdWriter to another process, "
            text += "and a client is of the process that connected"
            hint = "leave async_checkpointer_type out: ckptd's daemon is the process that drains while training goes on"
            raise UsageError(text, hint=hint)
        return plain(self, *args, **kwargs)

    execute_save.refuses_ckptd = True  # type: ignore[attr-defined]
    kind.execute_save = execute_save
