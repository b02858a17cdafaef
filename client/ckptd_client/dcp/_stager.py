"""The stager: one copy, from the state straight into the slot that the writer hands over later."""

import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from ckptd.shared.base.errors import UsageError
from ckptd.shared.format.layout import decode_leaves
from ckptd.shared.format.packed_layout import decode_layout
from ckptd_client._image.plan import Plan, Spec
from ckptd_client._local.slots import SlotMap
from ckptd_client._save import compared
from ckptd_client._state.pickle import decode
from ckptd_client._state.tensors import DTYPE_OF, PLAIN_TYPES, Chunk
from ckptd_client._state.tree import unflatten
from ckptd_client.client import staging_of
from ckptd_client.dcp._boxes import Boxes
from ckptd_client.dcp._staged import Staged, StagedState, Unstaged
from ckptd_client.dcp._writer import CkptdWriter


class CkptdStager(AsyncStager):
    """Stager of DCP: `dcp.async_save(state, storage_writer=writer, async_stager=CkptdStager(writer))`.

    `stage` copies the state once, into shared memory, blocks at most `save_timeout_s`, and returns a state of the same
    names whose tensors lie there. The caller may then change its own state freely. The save that follows in the
    background plans, seals and hands over, and copies no tensor again. All of a rank's state is staged, also what DCP
    would leave to another rank. A fault while staging is raised by the future, where DCP gathers errors from all ranks.

    Args:
        writer: The CkptdWriter of the same save. Another CkptdWriter refuses the state; DCP's own writers take it. A
            slot that no CkptdWriter takes is free again when the state is gone.
    """

    _synchronize_after_execute = False

    def __init__(self, writer: CkptdWriter) -> None:
        if not isinstance(writer, CkptdWriter):
            text = f"CkptdStager takes the CkptdWriter of the same save, not {type(writer).__name__}"
            raise UsageError(text, hint="writer = CkptdWriter(client), then CkptdStager(writer)")
        self._writer = writer
        self._tensors: WeakKeyDictionary[SlotMap, tuple[str, list[torch.Tensor]]] = WeakKeyDictionary()
        self._paths: tuple[str, dict[str, Any]] = ("", {})

    def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]] | dict[str, Any]:
        """The state as it is now, which may be changed freely afterwards. Blocks at most save_timeout_s."""
        began = time.perf_counter()
        client = self._writer.client
        staged = Staged(staging_of(client).numbers.count())
        try:
            state = StagedState(self._stage(state_dict, staged))
        except Exception as error:  # noqa: BLE001 - raised by the writer, where all ranks hear of it
            staged.error = error
            state = StagedState({"not staged": Unstaged(error)})
        staged.state = weakref.ref(state)
        staged.taken_by(state)
        staged.seconds = time.perf_counter() - began
        self._writer.add_staged(staged)
        return state

    def synchronize_staging(self) -> None:
        """Nothing: stage has copied everything."""

    def close(self) -> None:
        """Releases the slots."""
        self._tensors.clear()

    def _stage(self, state: dict[str, Any], staged: Staged) -> dict[str, Any]:
        staging = staging_of(self._writer.client)
        deadline = staging.until()
        plan, values = compared.plan_of(staging, state, deadline)
        segment = staging.fill(plan, values.tensors, values.plain.nbytes, owner=self._writer, deadline=deadline)
        staged.segment = segment
        staged.leaves = decode_leaves(values.plain.leaves, where="state").leaves
        tensors = dict(zip((plan.names[i] for i in plan.tensors), self._in_slot(segment.slot, plan), strict=True))
        if self._paths[0] != plan.plan_id:
            self._paths = (plan.plan_id, decode_layout(plan.layout, where="state").paths)
        made: dict[str, Any] = unflatten(
            (
                tuple(("l", step[1]) if step[0] == "t" else step for step in path),
                tensors[name] if name in tensors else decode(staged.leaves[name], name, name, staging.pickle_keys),
            )
            for name, path in self._paths[1].items()
        )
        return made

    def _in_slot(self, slot: SlotMap, plan: Plan) -> list[torch.Tensor]:
        """The state's tensors, DTensors too, over the memory of a slot; made once per slot and plan."""
        known = self._tensors.get(slot)
        if known is None or known[0] != plan.plan_id:
            known = self._tensors[slot] = (plan.plan_id, list(_tensors(slot, plan)))
        return known[1]


def _tensors(slot: SlotMap, plan: Plan) -> Iterator[torch.Tensor]:
    chunks: dict[str, list[Chunk]] = {}
    for box, view in zip(plan.image.boxes, plan.views(slot.bytes), strict=True):
        chunks.setdefault(box.name, []).append(Chunk(box.offsets, box.sizes, view.view(DTYPE_OF[box.dtype])))
    owner = dict(plan.ties)
    cut = set(plan.cut)
    sharded = dict(plan.sharded)
    for at, (position, (kind, shape, dtype, _)) in enumerate(zip(plan.tensors, plan.described, strict=True)):
        source = owner.get(position, position)
        own = chunks.get(plan.names[source], [])  # of an empty shard there is none
        if kind in PLAIN_TYPES:
            yield own[0].local
        elif source in cut or not own or at not in sharded:
            yield Boxes(shape, dtype, own)
        else:
            yield _dtensor(own[0].local, shape, sharded[at])


def _dtensor(local: torch.Tensor, shape: torch.Size, spec: Spec) -> torch.Tensor:
    """A DTensor over local, which stays where it is: from_local would move it to the mesh's device."""
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), local.dtype)
    whole = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
    made: torch.Tensor = DTensor(local, whole, requires_grad=False)  # type: ignore[no-untyped-call]
    return made
