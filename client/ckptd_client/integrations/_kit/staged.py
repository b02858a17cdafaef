"""A save on its way into a directory of the trainer's own: staged now, linked there when it is durable.

What goes wrong on one rank ends the save on all, and is raised on all, by land.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch.distributed as dist

from ckptd.shared.base.errors import CkptdError, SaveFailedError, UsageError
from ckptd.shared.format.layout import VERSION, Leaf, Leaves, decode_leaves, encode_leaves
from ckptd.shared.format.origin import Origin
from ckptd_client._image.segment_plan import Plain
from ckptd_client._local.save_record import SaveRecord
from ckptd_client._save import compared
from ckptd_client._save.segment import Segment
from ckptd_client._state import pickle as pickling
from ckptd_client.client import Client, staging_of
from ckptd_client.dcp._writer import step_of
from ckptd_client.handle import SaveHandle, handle_of
from ckptd_client.integrations._kit.drafts import draft_in_place, is_filled, prepare_in_place, publication_of
from ckptd_client.integrations._kit.latch import Latch, await_latch


class Content(NamedTuple):
    """What a rank saves. Each object is one value under its name, whatever it is made of."""

    tensors: dict[str, Any]
    objects: dict[str, Any]


class Staged:
    """One save of this rank."""

    wait_fn = staticmethod(await_latch)
    """Blocks until the save has ended, for better or worse; for another process, with wait_args."""

    def __init__(self, client: Client, directory: str, synced: Collection[str]) -> None:
        self._record: SaveRecord | None = None
        self.error: Exception | None = None
        self._client = client
        self._staging = staging_of(client)
        self._directory = directory
        self._synced = synced
        self._latch = Latch()
        self._segment: Segment | None = None
        self._leaves = b""  # encoded, of this rank

    @property
    def handle(self) -> SaveHandle | None:
        """Of the save, None where it did not begin."""
        return handle_of(self._record) if self._record is not None else None

    @property
    def wait_args(self) -> tuple[int, int]:
        """Of wait_fn. A fork and a pickle may have them."""
        return self._latch.place

    def watch(self) -> None:
        """Opens the latch when the save has ended."""
        threading.Thread(target=self._open_at_the_end, name="ckptd-drain", daemon=True).start()

    def _open_at_the_end(self) -> None:
        self.settle()
        self._latch.open()

    def settle(self) -> None:
        """Waits until the save is durable, or cannot be."""
        try:
            self._durable()
        except CkptdError:
            return

    def _durable(self) -> None:
        if self.error is not None:
            raise self.error
        if self._record is not None:
            self._record.wait("durable")

    def land(self) -> None:
        """Blocks until the checkpoint is in the directory. Collective; what fails on a rank is raised on all."""
        try:
            _together(self._client, self._durable)
            _together(self._client, self._check)
        finally:
            self._latch.close()

    def _check(self) -> None:
        origin = self._origin
        if self._client.group.rank == 0 and not is_filled(self._client, self._directory, origin):
            text = f"{origin.path} is not there any more, or is another run's: {self._directory} gets nothing"
            raise SaveFailedError(text, hint=f"ckptd list {origin.store}/{origin.job}")

    @property
    def _origin(self) -> Origin:
        assert self._record is not None  # noqa: S101 - it is durable
        return Origin.of(self._staging.job, self._record.save_id)

    # --- staging

    def stage(self, content_of: Callable[[], Content], step: int | None) -> None:
        """The one copy; then rank 0 gets the plain values of all, for stock readers. Collective; keeps what fails."""
        began = time.perf_counter()
        with self._kept():
            self._fill(content_of, step)
        others = _on_rank_0(self._client, self._leaves)
        if self._record is not None:
            self._record.held_since = began
        with self._kept():
            if self.error is None:
                self._hand_over(others)
        if self._record is not None:
            self._record.held_since = None
            self._record.stall_s = time.perf_counter() - began

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        """What goes wrong is for land to raise; here it ends the save, on all ranks."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - see above
            self.error = error
            if self._segment is not None:
                self._staging.release(self._segment)
            if self._record is not None:
                self._staging.give_up(self._record, error)

    def _fill(self, content_of: Callable[[], Content], step: int | None) -> None:
        staging = self._staging
        deadline = staging.until()
        self._record = staging.open(staging.numbers.name(staging.numbers.count(), step))
        content = content_of()
        plan, values = compared.plan_of(staging, content.tensors | dict.fromkeys(content.objects), deadline)
        keys = self._staging.pickle_keys
        found = {k: pickling.encode(v, k, repr(k), allowed=keys.allow(k)) for k, v in content.objects.items()}
        self._leaves = encode_leaves(Leaves(VERSION, found))
        # Rank 0's are there twice, and the others' once more; what is wanting then is found when it is sealed.
        nbytes = 2 * len(self._leaves)
        self._segment = staging.fill(plan, values.tensors, nbytes, owner=self._record, deadline=deadline)

    def _hand_over(self, others: dict[str, Leaf]) -> None:
        assert self._record is not None and self._segment is not None  # noqa: S101, PT018 - _fill made both
        to = publication_of(self._client, draft_in_place(self._directory))
        if self._client.group.rank == 0:
            prepare_in_place(self._directory, self._origin, synced=self._synced)
        said = compared.attestation_of_segment(self._staging, self._segment, self._record, drain=True)
        plain = Plain(self._leaves, compared.stock_objects(self._staging, others), lambda: said)
        self._staging.seal(self._segment, self._record, plain, drain=True, publication=to)


def stage(client: Client, content_of: Callable[[], Content], directory: str, *, synced: Collection[str] = ()) -> Staged:
    """Stages what content_of gives, for a directory whose name ends in the step. Collective.

    The same step may be saved into several directories, or into one again: it gets the next number that is free.
    synced: files that lie there, and must be on disk before the checkpoint is.
    """
    staged = Staged(client, directory, synced)
    try:
        step: int | None = client.free_step(step_of(directory))
    except UsageError:
        step = None
    staged.stage(content_of, step)
    staged.watch()
    return staged


def _on_rank_0(client: Client, leaves: bytes) -> dict[str, Leaf]:
    """The plain values of all ranks, rank 0's first, on rank 0; on the others none."""
    group = client.group
    parts: list[bytes] | None = [b""] * group.world_size if group.rank == 0 else None
    if dist.is_initialized():
        dist.gather_object(leaves, parts)
    found: dict[str, Leaf] = {}
    for part in reversed(parts or [leaves][group.rank :]):
        found |= decode_leaves(part, where="state").leaves if part else {}
    return found


def _together(client: Client, act: Callable[[], None]) -> None:
    """Acts; raises SaveFailedError on all ranks, naming those where it failed. Collective."""
    try:
        act()
        problem = ""
    except (CkptdError, OSError) as error:
        problem = str(error)
    problems = [problem] * client.group.world_size
    if dist.is_initialized():
        dist.all_gather_object(problems, problem)
    failed = {rank: text for rank, text in enumerate(problems) if text}
    if failed:
        rank, text = next(iter(failed.items()))
        more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
        raise SaveFailedError(f"rank {rank}{more}: {text}")
