"""The client: connect, save, load, wait. One per rank; its methods may be called from any thread, one at a time.

In a forked child, such as a DataLoader's worker, what needs the daemon raises UsageError, and close does nothing.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, NoReturn, Self

from ckptd.shared.base.errors import CkptdError, ConnectError, RestoreError, SaveFailedError, WaitTimeoutError
from ckptd.shared.protocol.messages import AskDrain, Milestone, Request
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
from ckptd_client._preempt.preemption import Preemptible
from ckptd_client._save.end_warning import EndWarning
from ckptd_client._save.files import save_files
from ckptd_client._save.files_plan import publication_of
from ckptd_client._save.late.overlapping import Verify
from ckptd_client._save.listening import Listening
from ckptd_client._save.saving import Saving
from ckptd_client._save.staging import Staging
from ckptd_client._save.stats import Stats
from ckptd_client._save.unchanged import are_still
from ckptd_client._state.pickle import PickleKeys
from ckptd_client.files import TrainerFile
from ckptd_client.handle import SaveHandle, check_milestone

log = logging.getLogger("ckptd_client")


class Client(Preemptible):
    """Made by connect. Use as a context manager, or call close."""

    def __init__(self, link: Link, save_timeout_s: float, *, dual: bool = True) -> None:
        self._staging = Staging(link, save_timeout_s, dual=dual)
        self._saving = Saving(self._staging)
        link.handed_over = Listening(self._staging).begin
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
        """Which life of the job this is; connect and load each begin a new one."""
        return self._link.incarnation

    @property
    def run(self) -> str:
        """The id of this run of the job, random, drawn with the incarnation: 32 hex digits."""
        return self._link.run.hex()

    @property
    def pickle_keys(self) -> PickleKeys:
        """Which keys allow_pickle names."""
        return self._link.settings.pickle_keys

    @property
    def group(self) -> Group:
        """This rank's place in the job."""
        return self._link.group

    def stats(self) -> Stats:
        """Counts and stalls since connect."""
        return self._staging.stats

    def steps(self, *, by_save: bool = False) -> list[int]:
        """Steps that load could restore, the lowest first. by_save: the newest save first, whatever its number.

        Alike on every node: blocks until the daemon that coordinates the job has answered, 10 s at most. Raises
        PeerError when it does not, RestoreError when it does not know yet what the store has.
        """
        found = [c.step for c in self._staging.checkpoints()]
        return list(dict.fromkeys(found)) if by_save else sorted(set(found))

    def latest(self) -> int | None:
        """The step that load would restore, None when there is none. Blocks and raises as steps does."""
        found = self._staging.checkpoints()
        return found[0].step if found else None

    def _check_open(self) -> None:
        self._staging.check_open()

    def _ask(self, make: Callable[[int], Request], patience_s: float | None = None) -> Any:
        return self._staging.ask(make, patience_s)

    # --- save

    def attach(self, *optimizers: Any, verify: Verify | None = None) -> None:
        """From now on save copies these optimizers' parameters and state while the next forward and backward run.

        Their step() waits, in a hook, for what is left of the copy; for a GPU's copy its stream waits. Everything else
        in the state is copied before save returns, as without attach. Nothing but step() may write to them between save
        and the end of the copy, be it through .data, numpy or another thread: a save in which somebody does is given
        up, and from then on such tensors are copied before save returns.

        verify: how that is found out. "proof", the default of the host's memory: its pages are write-protected while
        they are copied (Linux 6.7, huge pages, put together in the background first); of GPUs, where it has to be asked
        for: a checksum of all bytes, one read on the GPU's current stream. "samples": some elements of each tensor, on
        trust. "off", the default of GPUs: nothing is copied late. Without what proof takes nothing is copied late.
        stats().late says what is in force.

        Optimizers of which more is known to write (FSDP1, DeepSpeed, steps in backward or in a CUDA graph) are saved as
        without attach. Raises UsageError for what is no torch optimizer.
        """
        self._check_open()
        self._saving.overlapping.attach(optimizers, verify)

    def prepare(self, state: dict[str, Any]) -> None:
        """Plans; has all slots allocated, mapped and, for GPUs, pinned: a first save costs what the next will. Blocks.

        load has it done in the background, but for the pinning.

        Raises UsageError for what cannot be saved, BudgetError, with the numbers, when the slots do not fit.
        """
        check_not_capturing()
        with self._settled():
            self._saving.preparing.make_ready(state)

    def save(self, state: dict[str, Any], step: int | None = None, *, drain: bool = False) -> SaveHandle:
        """Stages the state and returns as soon as training may go on.

        step: default the one after the last. drain: make this one durable whatever drain_every says. The state may be
        changed freely afterwards. Raises UsageError for a misuse only; what goes wrong otherwise is in the handle.
        """
        return self._saving.save(state, step, drain=drain)

    @contextlib.contextmanager
    def _settled(self) -> Iterator[None]:
        with self._saving.settled(self._staging.until(), patient=True):
            self._check_open()
            yield

    # --- wait

    def wait(self, milestone: str = "durable", timeout_s: float | None = None) -> SaveHandle | None:
        """Blocks until the newest save reached the milestone; "durable" forces its drain. None when nothing was saved.

        "protected" forces nothing: where no redundancy is in force it waits for a save that is due for a drain, and
        raises for one that is not. Raises SaveFailedError when it cannot be reached, WaitTimeoutError after timeout_s.
        """
        wanted, timeout_s = check_milestone(milestone), as_patience(timeout_s)
        self._check_open()
        self._saving.overlapping.settle(self._staging.until())
        self._staging.pump(0.0)
        handle = self._link.book.newest
        if handle is None:
            return None
        if wanted is Milestone.DURABLE and not handle.reached(wanted):
            self._ask(lambda seq: AskDrain(seq=seq), timeout_s)
            handle.reopen()
        try:
            return handle.wait(milestone, timeout_s)
        except SaveFailedError:
            newest = self._link.book.newest
            if newest is None or newest is handle:
                raise
            return newest.wait(milestone, timeout_s)  # another thread saved meanwhile

    # --- load

    def load(
        self, state: dict[str, Any], step: int | None = None, *, run: str | None = None, strict: bool = True
    ) -> Restored | None:
        """Restores the newest checkpoint (or that of a step) into the state; None when there is nothing to restore.

        None also where all that the job had was staged only and is lost with a node: a warning says what.
        Collective; blocks until all ranks have read. Tensors are filled in place, plain leaves put into the state's
        containers, Statefuls given their load_state_dict. What each Stateful's state_dict() gives then is compared with
        what was saved: an optimizer's state is put back as it was saved where load_state_dict converted it; any other
        difference of a tensor raises. Plain values that were put only into a dict that state_dict() had given are named
        in notes: pass the objects themselves.
        Each block of bytes is checked before it is used; a damaged checkpoint is passed over for an older one, and
        notes says so. run: the id of a run of this job, of which alone a checkpoint is taken; needed only where two
        runs have one incarnation number and the store does not tell which is the job's: the error names both.
        strict: whether state and checkpoint must have the same keys. strict=False loads what both have, as exactly as
        ever, and notes names what is only in one: that stays as it is. An optimizer must have the same parameters.
        Afterwards the memory for saves of this state is made in the background, from the first step on where an
        optimizer has no state before it; a warning says when it cannot be had.
        Raises MismatchError, with the keys, when the state does not fit or an object does not keep what was saved,
        RestoreError when there is a checkpoint but none can be read: the tensors may then hold parts of it.
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

        Of any number of ranks and any layout; each rank reads the ranges that it needs. Not collective, needs no
        daemon, and begins no new incarnation. What the checkpoint has and the state has no place for is left out.
        together: all ranks of the job call it, for the same checkpoint; it blocks until they do, and of ckptd's own
        what several need is read once. integrity: "xxh3" takes a checkpoint that is not keyed, or another program's,
        though this client has a key. strict: as in load; strict=False also takes a state of which something is missing
        in the checkpoint, and names in notes what is only in one of them.
        An optimizer's state is put back as in load; a saved tensor that an object leaves out is named in notes.
        Raises MismatchError when something of the state is missing or of another shape or dtype, DamagedError for
        bytes that are not what they should be (only ckptd's own have digests), RestoreError for a file that cannot be
        opened, and for a value that is a pickle, but for keys of allow_pickle in a checkpoint of ckptd.
        """
        self._check_open()
        return read_from(self._link, path, state, together=together, integrity=integrity, strict=strict)  # no lock

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
        """Stages a trainer's own files, by relative path; like save otherwise, on all ranks, each with its own or none.

        directory: where the daemon has them appear once they are drained, without a second copy; all ranks say the
        same. whole: the directory is this save's alone, and appears, or is replaced, at once; else each file is put
        into it. pointer: (path, text) of a small file that is written after that, such as DeepSpeed's latest. Raises
        UsageError for a misuse, and what pickling a TorchFile raises; what goes wrong otherwise is in the handle.
        """
        publication = publication_of(directory, whole=whole, pointer=pointer, job=self._link.job)
        return save_files(self._staging, files, step, publication, drain=drain)

    def are_still(self, handle: SaveHandle, files: Mapping[str, TrainerFile]) -> bool:
        """Whether these files have the very bytes that save_files staged of them, and their slot has those still.

        Compares all bytes of this rank's. Raises what pickling a TorchFile raises.
        """
        return are_still(self._staging, handle.save_id, files)

    def free_step(self, wanted: int) -> int:
        """The step, or the next one that was not saved yet in this incarnation: for several checkpoints of one step.

        The same on ranks that saved the same steps, whatever became of those: each hears of it in its own time.
        """
        return self._staging.numbers.free_step(_settings.as_step(wanted))

    def load_files(self, step: int | None = None) -> RestoredFiles | None:
        """The files of the newest checkpoint (or that of a step), to be read by name; None when there is none.

        Collective. Any rank reads those of all: from this node's memory, the other nodes', or the store. Close it.
        Raises RestoreError when there is a checkpoint but none can be read.
        """
        found = self._find(step)
        return RestoredFiles(found) if found is not None else None

    def gather(
        self, state: Any, *, to: Ranks = None, bucket_nbytes: int = BUCKET_NBYTES, cpu_offload: bool = True
    ) -> Gathering:
        """Begins to build whole tensors from a state's shards; ``gather(state).wait()`` is the whole state.

        Or iterate over it, for one tensor after the other. Collective: all ranks call it alike, and use what it gives.
        state: as for save; shards are DTensors of any placement, ShardedTensors and FlatParts. to: the rank, or ranks,
        that get the tensors, default all. bucket_nbytes: how much travels at a time; three such are on their way.
        cpu_offload: gives CPU tensors; else each is made where its shards are. What is made of shards has memory of its
        own; tied ones become one tensor. Needs no daemon. Raises UsageError, on all ranks and with the first
        difference, for what cannot be gathered, or not by all alike; GatherError when another rank is gone.
        """
        self._check_open()
        return Gathering(state, Order(to, bucket_nbytes, cpu_offload), GROUPS)

    def find(self, step: int | None = None) -> Checkpoint:
        """The checkpoint that load would restore, agreed by all ranks and to be read by the caller. Collective.

        Raises RestoreError when there is none.
        """
        found = self._find(step)
        if found is None:
            raise RestoreError(
                "there is no checkpoint to restore", hint=f"ckptd list {self._link.job.store}/{self.job}"
            )
        return found

    def _find(self, step: int | None) -> Checkpoint | None:
        with self._settled():
            order, found = find(self._link, None if step is None else _settings.as_step(step))
            self._staging.numbers.begin_incarnation(order)
            if found is not None:
                found.notes = (*order.notes, *found.notes)
            return found

    # --- the end

    def close(self) -> None:
        """Leaves the job. What was staged becomes durable in the background, then its memory is freed. Idempotent.

        Warns where the newest saves are known not to be safe: other ranks did not save them, or their drains fail.
        Blocks until an overlapped save is handed over, save_timeout_s at most. In a forked child it does nothing: the
        job is its parent's.
        """
        self._close(quiet=False)

    def _close(self, *, quiet: bool) -> None:
        """quiet: the user reads of an error of ours already."""
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
                self._link.close()
                self._end_warning.end("" if quiet else "closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(quiet=isinstance(error, CkptdError))


def staging_of(client: Client) -> Staging:
    """Of a client, for what saves in two steps: DCP's writer, and trainers."""
    return client._staging  # noqa: SLF001 - the one door to it
