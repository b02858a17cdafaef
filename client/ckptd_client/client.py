"""The client: connect, save, load, wait. One per rank."""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, NoReturn, Self

from ckptd.shared.base.errors import CkptdError, ConnectError, RestoreError, SaveFailedError, WaitTimeoutError
from ckptd.shared.format.save_metadata import checked_metadata
from ckptd.shared.protocol.messages import AskDrain, Milestone, Reply, Request
from ckptd_client._daemon import settings as _settings
from ckptd_client._daemon.link import Link
from ckptd_client._gather import BUCKET_NBYTES, GROUPS, Gathering, Order, Ranks
from ckptd_client._load.checkpoint import Checkpoint
from ckptd_client._load.files import RestoredFiles
from ckptd_client._load.foreign.load_from import Loaded, read_from
from ckptd_client._load.lenient import check_load
from ckptd_client._load.restored import Restored, finished
from ckptd_client._load.rounds import find, load
from ckptd_client._local.argument_checks import as_patience
from ckptd_client._local.copy_engines import check_not_capturing
from ckptd_client._local.rank import Group
from ckptd_client._local.save_record import check_milestone
from ckptd_client._preempt.preemption import Preemptible
from ckptd_client._save.end_warning import EndWarning
from ckptd_client._save.files import publication_of, save_files
from ckptd_client._save.late.overlapping import Verify
from ckptd_client._save.listening import Listening
from ckptd_client._save.saving import Saving
from ckptd_client._save.staging import Staging
from ckptd_client._save.stats import Stats
from ckptd_client._save.unchanged import are_still
from ckptd_client.files import TrainerFile
from ckptd_client.handle import SaveHandle, handle_of

log = logging.getLogger("ckptd_client")


class Client(Preemptible):
    """A rank's connection to the daemon of its node. `connect` makes it; use it as a context manager, or call `close`.

    Its methods may be called from any thread, one at a time. In a forked child, such as a DataLoader worker, methods
    that need the daemon raise UsageError, and `close` does nothing.
    """

    def __init__(self, link: Link, save_timeout_s: float, *, dual: bool = True) -> None:
        self._staging = Staging(link, save_timeout_s, dual=dual)
        self._saving = Saving(self._staging)
        link.outbox.handed_over = Listening(self._staging).begin
        self._link, self._owner = link, self._staging.owner
        try:
            warnings = link.connect()
        except BaseException as error:
            link.close()
            if isinstance(error, WaitTimeoutError):  # of whoever did not answer, to a caller of connect
                raise ConnectError(error.message, hint=error.hint) from None
            raise
        for warning in warnings if link.group.rank == 0 else []:
            log.warning("ckptd: %s", warning)
        self._end_warning = EndWarning(self._staging)

    def __repr__(self) -> str:
        group, closed = self.group, ", closed" if self._staging.closed else ""
        where = f"rank {group.rank} of {group.world_size}, store {self._link.job.store!r}"
        return f"<Client of job {self.job!r}: {where}, incarnation {self.incarnation}{closed}>"

    def __reduce__(self) -> NoReturn:
        self._staging.__reduce__()

    # --- what a user asks about

    @property
    def job(self) -> str:
        """The job's name."""
        return self._link.job.job

    @property
    def incarnation(self) -> int:
        """The number of this start of the job; `connect` and each `load` take the next one."""
        return self._link.incarnation

    @property
    def run(self) -> str:
        """The random id of this run of the job, drawn with the incarnation: 32 hex digits."""
        return self._link.run.hex()

    @property
    def group(self) -> Group:
        """This rank's place in the job."""
        return self._link.group

    def stats(self) -> Stats:
        """Returns counts and stalls since `connect`. Does not block."""
        return self._staging.stats

    def steps(self, *, by_save: bool = False) -> list[int]:
        """Returns the steps that `load` could restore, the same on every node.

        Blocks until the daemon that coordinates the job has answered, 10 s at most.

        Args:
            by_save: True orders them by save, the newest first; False by number, the lowest first.

        Raises:
            PeerError: That daemon does not answer.
            RestoreError: It does not know yet what the store has.
        """
        found = [c.step for c in self._staging.checkpoints()]
        return list(dict.fromkeys(found)) if by_save else sorted(set(found))

    def latest(self) -> int | None:
        """Returns the step that `load` would restore, None when there is none. Blocks and raises as `steps` does."""
        found = self._staging.checkpoints()
        return found[0].step if found else None

    def _check_open(self) -> None:
        self._staging.check_open()

    def _ask(self, make: Callable[[int], Request], patience_s: float | None = None) -> Any:
        return self._staging.ask(make, patience_s)

    # --- save

    def attach(self, *optimizers: Any, verify: Verify | None = None) -> None:
        """From now on `save` copies these optimizers' parameters and state while the next forward and backward run.

        Their `step()` waits, in a hook, for the rest of the copy; for the copy of a GPU its stream waits. `save` copies
        everything else in the state before it returns, as without `attach`. Between `save` and the end of the copy only
        `step()` may write to these tensors, also through `.data`, numpy or another thread. A save during which anything
        else writes is given up, and from then on `save` copies such tensors before it returns. Optimizers with other
        known writers (FSDP1, DeepSpeed, steps in backward or in a CUDA graph) are saved as without `attach`.

        Args:
            optimizers: Torch optimizers. Their state may still be empty.
            verify: How such writes are found. "proof", the default for host memory: its pages are write-protected
                during the copy (Linux 6.7, huge pages, which the daemon puts together in the background first); for
                GPUs, only on request: a checksum of all bytes, which costs one read on the GPU's current stream.
                "samples": some elements of each tensor. "off", the default for GPUs: nothing is copied late. Where
                "proof" is not possible, nothing is copied late. `stats().late` gives the method in force.

        Raises:
            UsageError: An argument is no torch optimizer.
        """
        self._check_open()
        self._saving.overlapping.attach(optimizers, verify)

    def prepare(self, state: dict[str, Any]) -> None:
        """Plans the state and readies all slots: the first save then costs what the next ones do. Blocks.

        Allocates and maps the slots and, for GPUs, pins them.

        `load` does the same in the background, except for the pinning.

        Raises:
            UsageError: The state has a value that cannot be saved.
            BudgetError: The slots do not fit the memory; the message has the numbers.
        """
        check_not_capturing()
        with self._settled():
            self._saving.preparing.make_ready(state)

    def save(
        self, state: dict[str, Any], step: int | None = None, *, drain: bool = False,
        metadata: dict[str, int | float | str | bool] | None = None,
    ) -> SaveHandle:  # fmt: skip
        """Stages the state, and returns as soon as training may go on. Collective: every rank calls it.

        Blocks for the copy and at most `save_timeout_s`. The state may be changed freely afterwards. Operational faults
        (a full disk, a dead daemon) raise nothing; the handle has them.

        Args:
            state: Dict of tensors, containers, objects with `state_dict` and `load_state_dict`, and plain values.
            step: Number of the step, the same on all ranks. Default: one above the last.
            drain: True makes this save durable whatever `drain_every` says.
            metadata: Rank 0's is shown by `ckptd list`: at most 64 values such as `{"loss": 1.23}`, and 4 KiB.

        Returns:
            The handle of this save on this rank.

        Raises:
            UsageError: A misuse: a value that cannot be saved, with its key path, or a step that was saved before.
        """
        return handle_of(self._saving.save(state, step, drain=drain, metadata=checked_metadata(metadata)))

    @contextlib.contextmanager
    def _settled(self) -> Iterator[None]:
        with self._saving.settled(self._staging.until(), patient=True):
            self._check_open()
            yield

    # --- wait

    def wait(self, milestone: str = "durable", timeout_s: float | None = None) -> SaveHandle | None:
        """Blocks until the newest save has reached the milestone.

        Args:
            milestone: "staged", "protected" or "durable". "durable" forces the drain of the newest save. "protected"
                forces nothing: without redundancy it waits for a save that is due for a drain, and raises for one that
                is not.
            timeout_s: Most seconds to wait. Default: no limit.

        Returns:
            The handle of that save, None when nothing was saved.

        Raises:
            SaveFailedError: The milestone cannot be reached any more.
            WaitTimeoutError: It was not reached in time; it may still be.
        """
        wanted, timeout_s = check_milestone(milestone), as_patience(timeout_s)
        self._check_open()
        self._saving.overlapping.settle(self._staging.until())
        self._staging.pump(0.0)
        record = self._link.book.newest
        if record is None:
            return None
        if wanted is Milestone.DURABLE and not record.reached(wanted):
            self._ask(lambda seq: AskDrain(seq=seq), timeout_s)
            record.reopen()
        try:
            return handle_of(record).wait(milestone, timeout_s)
        except SaveFailedError:
            newest = self._link.book.newest
            if newest is None or newest is record:
                raise
            return handle_of(newest).wait(milestone, timeout_s)  # another thread saved meanwhile

    # --- load

    def load(
        self, state: dict[str, Any], step: int | None = None, *, run: str | None = None, strict: bool = True
    ) -> Restored | None:
        """Restores the newest checkpoint, or that of a step, into the state.

        Collective; blocks until all ranks have read. Fills tensors in place, puts plain values into the state's
        containers, and calls `load_state_dict` of its objects. Then compares each object's `state_dict()` with what was
        saved: where `load_state_dict` converted an optimizer's state, the saved values are put back; any other tensor
        that differs raises. Notes name plain values that only reached a dict that `state_dict()` had returned: pass the
        objects themselves. Every block of bytes is checked before it is used; a damaged checkpoint is passed over for
        an older one, with a note. Afterwards ckptd allocates the memory for saves of this state in the background; a
        warning says when that fails.

        Args:
            state: As for `save`.
            step: The step to restore. Default: the newest.
            run: Id of the run of this job to take a checkpoint of. Only needed where two runs have one incarnation
                number and the store does not show which is the job's: the error names both.
            strict: True: state and checkpoint must have the same keys. False: loads the keys that both have, as
                exactly; notes name the others, which stay as they are. An optimizer must have the same parameters.

        Returns:
            What was restored, with notes. None when there is nothing to restore, also when all that the job had was
                staged
            only and is lost with a node: a warning says so.

        Raises:
            MismatchError: The state does not fit, or an object did not keep what was saved; names the keys.
            RestoreError: There is a checkpoint, but none can be read. The tensors may then hold parts of it.
        """
        began = time.perf_counter()
        check_load(state, strict)
        step, chosen = None if step is None else _settings.as_step(step), _settings.as_run(run)
        with self._settled():
            order, segment = load(self._link, state, step, chosen, strict=strict)
            self._staging.numbers.begin_incarnation(order)
            rank = self._link.group.rank
            restored = finished(state, segment, order.notes, began=began, rank=rank) if segment is not None else None
            self._saving.preparing.after_load(state)
            return restored

    def load_from(
        self, path: str | os.PathLike[str], state: dict[str, Any], *, together: bool = False,
        integrity: str | None = None, strict: bool = True,
    ) -> Loaded:  # fmt: skip
        """Fills the state from a checkpoint anywhere: of ckptd, of torch.distributed.checkpoint, or safetensors files.

        The checkpoint may be of any number of ranks and any layout; each rank reads the ranges that it needs. Not
        collective, needs no daemon, and begins no new incarnation. Ignores what the checkpoint has and the state does
        not. Puts an optimizer's state back as `load` does; notes name saved tensors that an object leaves out.

        Args:
            path: Directory of the checkpoint, or a safetensors file.
            state: As for `save`.
            together: True: all ranks of the job call it for the same checkpoint. Blocks of ckptd's own checkpoints that
                several ranks or nodes need are then read once. A rank that fails, in any way, says so. For one that
                does not come, or is killed, the others of its node wait 10 s (60 s for the node's first rank), later
                20 s without any progress; nodes wait 10 s for another, 2 s more per level of 32. Then they read by
                themselves.
            integrity: "xxh3" accepts a checkpoint that is not keyed, or another program's, although this client has a
                key.
            strict: False also accepts a state with keys that the checkpoint lacks; notes name what is in only one of
                them.

        Raises:
            MismatchError: The checkpoint lacks something of the state, or has it in another shape or dtype.
            DamagedError: Bytes differ from their digest. Only ckptd's own checkpoints have digests.
            RestoreError: A file cannot be opened, a value is a pickle that `allow_pickle` does not name, or ranks that
                read together found different checkpoints.
        """
        self._check_open()
        ask = self._ask_place if together else None  # the lock is held for that question alone
        return read_from(self._link, path, state, together=ask, integrity=integrity, strict=strict)

    def save_files(  # noqa: PLR0913 - keyword-only
        self,
        files: Mapping[str, TrainerFile],
        step: int | None = None,
        *,
        drain: bool = False,
        directory: str | os.PathLike[str] | None = None,
        whole: bool = True,
        pointer: tuple[str | os.PathLike[str], str] | None = None,
    ) -> SaveHandle:
        """Stages a trainer's own files. Like `save` otherwise: every rank calls it, each with its own files or none.

        Args:
            files: Relative path of each file, and its content: bytes, `TorchFile` or `SafetensorsFile`.
            step: As for `save`.
            drain: As for `save`.
            directory: Where the daemon makes the files appear once they are drained, without a second copy. The same on
                all ranks.
            whole: True: the directory belongs to this save alone, and appears, or is replaced, at once. False: each
                file is put into it.
            pointer: (path, text) of a small file that is written afterwards, such as DeepSpeed's `latest`.

        Raises:
            UsageError: A misuse. Operational faults are in the handle.
            Exception: What pickling a TorchFile raises.
        """
        publication = publication_of(directory, whole=whole, pointer=pointer, job=self._link.job)
        return handle_of(save_files(self._staging, files, step, publication, drain=drain))

    def are_still(self, handle: SaveHandle, files: Mapping[str, TrainerFile]) -> bool:
        """Returns whether the files still have the bytes that the save of `handle` staged of them, in its slot too.

        Compares all bytes of this rank's files, and raises what pickling a TorchFile raises.
        """
        return are_still(self._staging, handle.save_id, files)

    def free_step(self, wanted: int) -> int:
        """Returns `wanted`, or the next step that is not saved yet: for several checkpoints of one step.

        The same on ranks that saved the same steps, whatever became of those saves.
        """
        return self._staging.numbers.free_step(_settings.as_step(wanted))

    def load_files(self, step: int | None = None) -> RestoredFiles | None:
        """Opens the files of the newest checkpoint, or that of a step. Collective; blocks until the ranks agree on it.

        Any rank reads the files of all ranks: from this node's memory, from that of other nodes, or from the store.

        Returns:
            The files, to be read by name and then closed. None when there is no checkpoint.

        Raises:
            RestoreError: There is a checkpoint, but none can be read.
        """
        found = self._find(step, whole=True)
        return RestoredFiles(found) if found is not None else None

    def gather(
        self, state: Any, *, to: Ranks = None, bucket_nbytes: int = BUCKET_NBYTES, cpu_offload: bool = True
    ) -> Gathering:
        """Begins to build whole tensors from a state's shards. Collective. `gather(state).wait()` is the whole state.

        Iterate over the result to get one tensor after the other. Needs no daemon. The built tensors have memory of
        their own; tied ones become one tensor. The state must not change until the end.

        Args:
            state: As for `save`. Shards are DTensors of any placement, ShardedTensors and FlatParts.
            to: The rank, or ranks, that get the tensors. Default: all.
            bucket_nbytes: Bytes per transfer; three transfers run at a time.
            cpu_offload: True builds CPU tensors, False each on the device of its shards.

        Raises:
            UsageError: Something cannot be gathered, or the ranks disagree. On all ranks, with the first difference.
            GatherError: Another rank is gone.
        """
        self._check_open()
        return Gathering(state, Order(to, bucket_nbytes, cpu_offload), GROUPS)

    def _ask_place(self, make: Callable[[int], Request], deadline: float | None) -> Reply:
        with self._settled():
            return self._link.ask(make, deadline)

    def _find(self, step: int | None, *, whole: bool) -> Checkpoint | None:
        with self._settled():
            wanted = None if step is None else _settings.as_step(step)
            order, found = find(self._link, wanted, self._ask_place, whole=whole)
            self._staging.numbers.begin_incarnation(order)
            if found is not None:
                found.notes = (*order.notes, *found.notes)
            return found

    # --- the end

    def close(self) -> None:
        """Leaves the job. Staged saves become durable in the background, then their memory is freed. Idempotent.

        Warns when the newest saves are not safe: other ranks did not save them, or their drains fail. Blocks until an
        overlapped save is handed over, `save_timeout_s` at most. Does nothing in a forked child.
        """
        self._close()

    def _close(self, error: BaseException | None = None) -> None:
        """error: what ended the training. The user reads of one of ours already."""
        if not self._owner.is_here:
            return
        self._saving.preparing.join(self._staging.save_timeout_s)
        with self._saving.settled(self._staging.until(), patient=True):
            if not self._staging.closed:
                self._end_warning.begin()
                self._staging.closed = True
                self._saving.preparing.forget_steps()
                self._saving.overlapping.detach()
                self._forget_preemption()
                self._link.close(error)
                self._end_warning.end("" if isinstance(error, CkptdError) else "closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(error)


def staging_of(client: Client) -> Staging:
    """Of a client, for what saves in two steps: DCP's writer, and trainers."""
    return client._staging  # noqa: SLF001 - the one door to it


def find_of(client: Client, step: int | None) -> Checkpoint:
    """Returns the checkpoint that `load` would restore, agreed by all ranks, for the caller to read. Collective.

    On the store each rank has looked at a part of the records.

    Raises:
        RestoreError: There is none.
    """
    found = client._find(step, whole=False)  # noqa: SLF001 - the same access
    if found is None:
        hint = f"ckptd list {staging_of(client).job.store}/{client.job}"
        raise RestoreError("there is no checkpoint to restore", hint=hint)
    return found
