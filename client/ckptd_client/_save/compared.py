"""This rank's attestation of replicas, for a state that is saved in two steps by DCP and trainers. Blocks."""

from collections.abc import Sequence
from typing import Any

from ckptd.shared.format.layout import Leaf
from ckptd.shared.format.replica_attestations import Attestation
from ckptd_client._image.plan import Plan, Values
from ckptd_client._local.save_record import SaveRecord
from ckptd_client._save.segment import Segment
from ckptd_client._save.staging import Staging
from ckptd_client._state.replica_slices import ByPosition, Stream, attestation_of, attestation_of_digests, digests_of


def plan_of(staging: Staging, state: dict[str, Any], deadline: float) -> tuple[Plan, Values]:
    """The client's own plan of a state, and its values now. Raises UsageError for what cannot be saved."""
    with staging.turn(deadline):
        return staging.plans.gather(state, balanced=False)  # DCP's planner has divided replicated tensors


def attestation_of_segment(
    staging: Staging, segment: Segment, handle: SaveRecord, *, drain: bool
) -> tuple[Attestation, ...]:
    """The attestation of a state in a slot, by the client's own plan. Raises WaitTimeoutError."""
    plan = segment.plan
    if not isinstance(plan, Plan) or not (plan.streams or plan.unseen):
        return ()
    stored = dict(zip(plan.stored, segment.views(), strict=False))  # the boxes of cut tensors come after them
    return plan.attest(lambda: attestation_of_streams(staging, plan.streams, stored, handle, drain=drain))()


def attestation_of_streams(
    staging: Staging, streams: Sequence[Stream], values: ByPosition[Any], handle: SaveRecord, *, drain: bool
) -> tuple[Attestation, ...]:
    """The attestation of each stream. The values must not change meanwhile. Raises WaitTimeoutError."""
    with staging.turn(staging.until()):
        sampling = staging.link.sampling
        sample = sampling.next(handle.save_id, drain=drain)
        sampling.record(streams, sample, handle)
    if sample.whole:
        return attestation_of_digests(streams, digests_of(streams, values))()
    return attestation_of(streams, values, sample)()


def stock_objects(staging: Staging, leaves: dict[str, Leaf]) -> bytes:
    """The leaves for stock readers, encoded; empty but on rank 0. Blocks at most save_timeout_s."""
    if staging.plans.stock is None:
        return b""
    with staging.turn(staging.until()):
        return staging.plans.stock.encode(leaves)
