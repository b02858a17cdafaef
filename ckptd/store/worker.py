"""The process that touches one store, so that a hung mount stops that store's drain and nothing else.

Started by worker_link with ``python -m ckptd.store.worker SOCKET_FD PARENT_PID NICE IONICE STORE``. It holds no lock,
keeps nothing between requests, and ends when its daemon does.
"""

import contextlib
import ctypes
import difflib
import errno
import functools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn, assert_never

from ckptd.history.account import account_of
from ckptd.shared.base.errors import CkptdError, ProtocolError
from ckptd.shared.base.ids import parse_dirname
from ckptd.shared.files.regular import contents
from ckptd.shared.format.integrity import XXH3, Integrity, Keyed
from ckptd.shared.protocol.journal import MAX_SEGMENT_NBYTES, Name, parse_name
from ckptd.shared.protocol.publication import Intent, Intents
from ckptd.shared.stores.kinds import loaded
from ckptd.store.drain import drain
from ckptd.store.interface import Store
from ckptd.store.journal import Here, last_of_others, put_segment, read_journal
from ckptd.store.journal_messages import AccountRead, PutJournal, ReadAccount
from ckptd.store.messages import (
    DAEMON,
    LANES,
    MAIN,
    WORKER,
    Commit,
    Done,
    Drain,
    DrainParity,
    Failed,
    FrameReader,
    Probe,
    Progress,
    Publish,
    Published,
    RemoveCheckpoint,
    Removed,
    RemovePartial,
    Reply,
    Request,
    ScanJob,
    Scanned,
    Space,
    SweepTrash,
    TakeIncarnation,
    Taken,
    UseKey,
    WriteVote,
    decode_request,
    encode_frame,
    hello_frame,
    lane_of,
)
from ckptd.store.opening import open_store
from ckptd.store.parity import drain_parity
from ckptd.store.scrub_messages import MendCheckpoint, ReadBlock, ScrubCheckpoint
from ckptd.system import failpoints
from ckptd.system.niceness import Niceness

_THREADS = 6  # requests of the main lane at once: a hung one leaves five
_RECEIVE_NBYTES = 1 << 20
_PROGRESS_PERIOD_S = 0.1
_PR_SET_PDEATHSIG = 1
_OFFLINE = "ckptd.checkpoint.requests:carry_out"  # imported when it is first asked for
MOST_JOBS = 5  # that are named
_MOST_DIRECTORIES = 20  # that are looked into: a store may have thousands


def other_jobs(store: Store, job: str) -> list[str]:
    """Some of them with the step of the newest checkpoint, the likest name first; "..." at the end: there may be more.

    Goes by names alone, and raises nothing: what cannot be listed is left out.
    """
    found: list[str] = []
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = [name for name in store.jobs() if name != job]
    likest = difflib.get_close_matches(job, names, n=MOST_JOBS)
    ordered = [*likest, *sorted(set(names).difference(likest))]
    for name in ordered[:_MOST_DIRECTORIES]:
        with contextlib.suppress(OSError):
            newest = store.names(name)[:1]
            found += [f"{name} (step {_step(dirname)})" for dirname in newest]
    more = len(found) > MOST_JOBS or (bool(found) and len(ordered) > _MOST_DIRECTORIES)
    return [*found[:MOST_JOBS], *(["..."] if more else [])]


def _step(dirname: str) -> int:
    parsed = parse_dirname(dirname)
    assert parsed is not None  # noqa: S101 - names lists no other ones
    return parsed[0]


class Worker:
    """Carries out requests of one daemon on one store: of the main lane several at once, of each other lane one.

    leave: ends the process; called in the thread of a request that has an answer and no daemon to send it to.
    """

    def __init__(self, sock: socket.socket, url: str, leave: Callable[[], None]) -> None:
        self._sock, self._leave = sock, leave
        self._url = url
        self._integrity: Integrity = XXH3  # until the daemon says UseKey
        self._sending = threading.Lock()
        self._pools = {lane: ThreadPoolExecutor(_THREADS if lane == MAIN else 1) for lane in LANES}

    def serve(self) -> None:
        """Returns when the daemon closes its end; requests may still be running in threads. Raises ProtocolError."""
        self._sock.sendall(hello_frame())
        frames = FrameReader(decode_request, theirs=DAEMON, ours=WORKER)
        while data := self._sock.recv(_RECEIVE_NBYTES):
            for request in frames.feed(data):
                if isinstance(request, UseKey):
                    self._integrity = Keyed(request.key)
                else:
                    self._pools[lane_of(request)].submit(self._answer, request)

    def _answer(self, request: Request) -> None:
        try:
            self._send(self._carry_out(request))
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, "")
            self._send(Failed(request.id, "os", name, *self._store.explain(error)))
        except CkptdError as error:
            self._send(Failed(request.id, error.code, "", error.message, error.hint))
        except Exception as error:  # noqa: BLE001  # whatever it is, the daemon must get its one answer
            self._send(Failed(request.id, "bug", "", f"{type(request).__name__}: {error!r}", "please report this"))
        if isinstance(request, Drain):
            failpoints.reach("drain.reported")

    @functools.cached_property
    def _store(self) -> Store:
        """Raises UsageError for a URL that no kind of store has."""
        return open_store(self._url, self._integrity)

    def _carry_out(self, request: Request) -> Done:  # noqa: C901, PLR0912 - one line per request
        store = self._store
        match request:
            case Drain():
                failpoints.reach("drain.ordered")
                store.check(request.store_id, request.job)
                return Done(request.id, drain(store, request, _Reporter(self, request.id)))
            case DrainParity():
                store.check(request.store_id, request.job)
                drain_parity(store, request)
                return Done(request.id)
            case WriteVote(vote=vote):
                store.check(vote.store_id, vote.job)
                failpoints.reach("commit.before-vote")
                store.put_vote(vote.job, vote)
                failpoints.reach("commit.after-vote")
                return Done(request.id)
            case Commit(job=job, save=save, writer=writer, by=by, intents=intents):
                alive = _Reporter(self, request.id).alive
                return Done(request.id, store.commit(job, save, writer, by, _by_save(intents), alive=alive))
            case Publish(job=job, intents=intents, own_part=own_part):
                return Done(request.id, Published(*store.publish(job, _by_save(intents), own_part)))
            case TakeIncarnation(job=job, by=taker):
                # exact is for those that nobody can warn: a number is for ranks that connect, and are warned
                opened = store.open(job, remembered=request.remembered, wanted=request.wanted)
                return Done(request.id, Taken(store.take(job, taker, request.at_least, request.until), opened))
            case ScanJob():
                return Done(request.id, self._scanned(request))
            case RemoveCheckpoint(job=job, save=save, intents=intents):
                return Done(request.id, Removed(pinned=not store.remove(job, save, _by_save(intents))))
            case RemovePartial(job=job, save=save):
                store.discard(job, save)
                return Done(request.id)
            case SweepTrash(job=job):
                store.sweep(job)
                return Done(request.id)
            case PutJournal():
                store.check(request.store_id, request.job)
                put_journal(store, request)
                return Done(request.id)
            case ReadAccount():
                store.check(request.store_id, request.job)
                return Done(request.id, read_account(store, request))
            case Probe():
                return Done(request.id, Space(*store.space()))
            case ScrubCheckpoint() | ReadBlock() | MendCheckpoint():
                store.check(request.store_id, request.job)
                carry_out = loaded(_OFFLINE)  # of a room that imports this one
                return Done(request.id, carry_out(store, request, _Reporter(self, request.id).alive))
            case _:
                assert_never(request)

    def _scanned(self, request: ScanJob) -> Scanned:
        store, job, claim = self._store, request.job, request.claim
        opened = store.open(
            job, remembered=request.remembered, wanted=request.wanted, make=request.make, exact=True
        )  # fmt: skip
        lost = claim is not None and bool(opened.store_id) and not store.claim(job, claim.incarnation, claim.by)
        found = store.scan(job)
        others = [] if found.committed or found.partials else other_jobs(store, job)
        return Scanned(opened, found, lost, others)

    def report(self, request_id: int, done: Mapping[str, int]) -> None:
        """Progress sent to the daemon."""
        self._send(Progress(request_id, sum(done.values()), dict(done)))

    def _send(self, reply: Reply) -> None:
        frame = encode_frame(reply)
        try:
            with self._sending:
                self._sock.sendall(frame)
        except OSError:
            self._leave()


def put_journal(store: Store, request: PutJournal) -> None:
    """What lies of the segment in the arena; more may be appended meanwhile. Raises OSError, ProtocolError."""
    name, stop = parse_name(request.name), request.start + request.nbytes
    content = contents(request.path, stop + MAX_SEGMENT_NBYTES)[request.start : stop]
    if name is None or len(content) < request.nbytes:
        raise ProtocolError(f"{request.path} has no {request.nbytes} bytes of a segment {request.name!r}")
    put_segment(store.records(request.job), name, content, first=request.first)


def read_account(store: Store, request: ReadAccount) -> AccountRead:
    """By the records on the store and those in the arena: these are read first, since they go there. Raises OSError."""
    files = store.records(request.job).files
    others = last_of_others(files, request.writer)
    if others == request.seen:
        return AccountRead(others, None)
    here: dict[Name, Here] = {}
    for one in request.segments:
        if (name := parse_name(one.name)) is not None:
            here[name] = Here(b"", one.nbytes)
            with contextlib.suppress(FileNotFoundError):
                content = contents(one.path, one.start + one.nbytes + MAX_SEGMENT_NBYTES)
                here[name] = Here(content[one.start :], one.nbytes)
    journal = read_journal(files, here, lambda n: n.writer != request.writer or n.number <= request.last)
    return AccountRead(others, account_of(journal.entries))


def _by_save(intents: list[Intent]) -> Intents:
    return {intent.save: intent.to for intent in intents}


class _Reporter:
    """Progress of one request, a few times a second. Called under the flow's lock, or by one thread."""

    def __init__(self, worker: Worker, request_id: int) -> None:
        self._worker = worker
        self._id = request_id
        self._next_s = 0.0

    def __call__(self, done: Mapping[str, int]) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + _PROGRESS_PERIOD_S
            self._worker.report(self._id, done)

    def alive(self) -> None:
        """The request continues, without bytes to count."""
        self({})


def _die_with(parent_pid: int) -> None:
    """Arranges for SIGKILL when the thread that started us ends; exits if that has happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(0)


def main(argv: list[str]) -> NoReturn:
    """Runs until the daemon closes the socket, then ends at once, also when a request hangs in the file system."""
    fd, parent_pid, cpu, io = map(int, argv[:4])
    _die_with(parent_pid)
    # A Ctrl-C or a stop of the unit is the daemon's to act on: it may want the drain finished first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Niceness(cpu, io).take()
    status = 0
    try:
        Worker(socket.socket(fileno=fd), argv[4], leave=lambda: os._exit(0)).serve()
    except ProtocolError as error:
        print(f"ckptd store worker: {error}", file=sys.stderr)  # noqa: T201  # its daemon is of another version
        status = 1
    except ConnectionError:
        pass
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
