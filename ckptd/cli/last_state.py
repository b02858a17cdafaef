"""The last state of a job that no daemon of this node serves: from its journal, its store and this node's arena.

A store may hang: ``python -m ckptd.cli.last_state ARENA JOB|PATH STORE|"" ...`` looks at them, and has a deadline.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import msgspec

from ckptd.cli import common, journals
from ckptd.daemon.left_behind import LeftJob, left_behind
from ckptd.history.last import LastSave, LastState, last_of
from ckptd.history.runs import runs_of
from ckptd.shared.base.decoding import MALFORMED
from ckptd.shared.base.errors import CkptdError, UsageError, of_code
from ckptd.shared.base.ids import JobKey
from ckptd.shared.base.wording import named_ranks
from ckptd.shared.files.child_process import told_within
from ckptd.store.journal import read_journal
from ckptd.store.opening import open_store
from ckptd.system import human

SCHEMA = 1


class InMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What this node's arena has of the job. ranks: that live; holders: ranks whose newest staged step is here."""

    arena: str
    ranks: list[int] = []
    step: int | None = None
    holders: list[int] = []
    world_size: int = 0


class Output(LastState, frozen=True, kw_only=True, tag="last"):
    """What --json prints of a job that no daemon here serves."""

    schema: int = SCHEMA
    job: str
    store: str
    memory: InMemory
    damaged: int
    problems: list[str]

    @property
    def where(self) -> str:
        """The job's location."""
        return f"{self.store}/{self.job}"

    @property
    def kept(self) -> LastSave | None:
        """The newest save that is staged and not durable, where this node's memory still has of it."""
        return next((one for one in self.unsaved[:1] if one.step == self.memory.step), None)


class _Refused(msgspec.Struct, frozen=True, tag="refused"):
    code: str
    message: str
    hint: str


class _Said(msgspec.Struct, frozen=True):
    """A line of the child, of the job at this place. None: its store has been read, and the rest is computed."""

    place: int
    what: Output | _Refused | None = None


_decoder = msgspec.json.Decoder(_Said)
_Wanted = tuple[str, str | None]  # a job or a path, and the store where the job is
_MOST_AT_ONCE = 64  # stores that hang leave the others a thread


def asked(arena: str, target: str, store: str | None, timeout_s: float) -> Output:
    """The last state of the job that is named. Raises CkptdError; when the store is silent until then, too."""
    (found,) = asked_of(arena, [(target, store)], timeout_s)
    if isinstance(found, CkptdError):
        raise found
    return found


def asked_of(arena: str, wanted: Sequence[_Wanted], timeout_s: float) -> list[Output | CkptdError]:
    """The same of several jobs, by one child and in the time of one: a store that hangs takes none of the others'."""
    arguments = [argument for target, store in wanted for argument in (target, store or "")]
    told, ended = told_within(timeout_s, "ckptd.cli.last_state", arena, *arguments)
    said: dict[int, Output | _Refused | None] = {}
    for text in told.splitlines():
        try:
            one = _decoder.decode(text)
        except MALFORMED:
            continue  # cut off
        said[one.place] = one.what
    return [
        _found(said.get(place), one, timeout_s, read=place in said, ended=ended) for place, one in enumerate(wanted)
    ]


def _found(
    said: Output | _Refused | None, wanted: _Wanted, timeout_s: float, *, read: bool, ended: bool
) -> Output | CkptdError:
    """read: the store has been. ended: nothing more will be said."""
    target, store = wanted
    if isinstance(said, Output):
        return said
    if said is not None:
        return of_code(said.code, said.message, said.hint)
    if ended:
        return CkptdError(f"{target}: its last state cannot be read", hint=f"ckptd history {target}")
    if read:
        text = f"the store of {target} answers, and its journal takes more than {timeout_s:g} s to evaluate"
        return CkptdError(text, hint="give a longer --timeout")
    hint = f"is the mount alive? timeout 10 stat -f {store or target}; or give a longer --timeout"
    return CkptdError(f"the store of {target} does not answer in {timeout_s:g} s", hint=hint)


def read(arena: str, target: str, store: str | None, was_read: Callable[[], None] = lambda: None) -> Output:
    """The same, in this process: blocks for as long as the store does. Raises CkptdError, OSError.

    was_read: is called once the store has given all.
    """
    key = journals.located(target, store)
    opened = open_store(key.store, common.integrity_of_settings())
    found = opened.scan(key.job)
    journal = read_journal(opened.files(key.job), journals.in_arena(arena, key))
    was_read()
    runs = runs_of(journal.entries)
    saves = [entry.committed.save for entry in found.committed]
    if not runs and not saves:
        raise UsageError(
            f"{key.store}/{key.job} has neither a journal nor a checkpoint", hint=f"ckptd list {key.store}"
        )
    last = last_of(runs, [(save.incarnation, save.counter, save.step) for save in saves])
    same = {name: getattr(last, name) for name in LastState.__struct_fields__}
    return Output(
        job=key.job, store=key.store, memory=_memory(arena, key), damaged=journal.damaged, problems=found.problems,
        **same,
    )  # fmt: skip


def _memory(arena: str, key: JobKey) -> InMemory:
    left = next((one for one in _left(arena) if one.job == key), None)
    if left is None:
        return InMemory(arena=arena)
    return InMemory(
        arena=arena, ranks=list(left.ranks), step=left.step, holders=list(left.holders), world_size=left.world_size
    )


def _left(arena: str) -> list[LeftJob]:
    try:
        return left_behind(arena, common.integrity_of_settings())
    except OSError:
        return []


def left(arena: str, timeout_s: float) -> tuple[list[str], list[str]]:
    """A line for each fact of the jobs that an arena without a daemon has, the worst first; then what to type.

    None where nothing is left, or nothing can be read. Blocks for up to timeout_s, for the stores.
    """
    found = _left(arena)
    states = asked_of(arena, [(one.job.job, one.job.store) for one in found], timeout_s) if found else []
    facts = [line for job in found for line in _living(job)]
    facts += [line for job, state in zip(found, states, strict=True) for line in _staged(job, state)]
    return facts, [f"last state of job {one.job.job}: ckptd status {one.job.store}/{one.job.job}" for one in found]


def _living(left: LeftJob) -> Iterator[str]:
    if left.ranks:
        yield f"job {left.job.job}: {living_text(left.ranks)}"


def living_text(ranks: tuple[int, ...] | list[int]) -> str:
    """Of ranks whose daemon is gone."""
    verb = "runs" if len(ranks) == 1 else "run"
    return f"{named_ranks(ranks)} {verb} here, and no save succeeds until a daemon runs"


def _staged(left: LeftJob, state: Output | CkptdError) -> Iterator[str]:
    name = left.job.job
    if left.step is not None:
        ranks = f"{len(left.holders)} of {human.counted(left.world_size, 'rank')}"
        yield f"job {name}: step {left.step} is in memory here ({ranks})"
    if isinstance(state, CkptdError):
        yield f"job {name}: {state.message}"
    else:
        yield f"job {name}: " + (f"step {state.durable.step} is durable" if state.durable else "nothing is durable")


def main(arena: str, *wanted: str) -> None:
    """Prints what ``read`` gives of each job and store, or why there is nothing: a line of JSON when it is known."""
    lock = Lock()

    def say(one: _Said) -> None:
        with lock:
            sys.stdout.buffer.write(msgspec.json.encode(one) + b"\n")
            sys.stdout.buffer.flush()

    def one(place: int, target: str, store: str) -> None:
        what: Output | _Refused
        try:
            with common.store_errors():
                what = read(arena, target, store or None, lambda: say(_Said(place)))
        except CkptdError as error:
            what = _Refused(error.code, error.message, error.hint)
        say(_Said(place, what))

    pairs = list(zip(wanted[::2], wanted[1::2], strict=True))
    with ThreadPoolExecutor(min(_MOST_AT_ONCE, len(pairs))) as threads:
        for place, (target, store) in enumerate(pairs):
            threads.submit(one, place, target, store)


if __name__ == "__main__":
    main(*sys.argv[1:])
