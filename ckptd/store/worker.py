"""The process that touches one store, so that a hung mount stops that store's drain and nothing else.

Started by worker_link with ``python -m ckptd.store.worker SOCKET_FD PARENT_PID NICE IONICE STORE``. It holds no lock,
keeps nothing between requests, and ends when its daemon does.
"""

import ctypes
import errno
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn, assert_never

from ckptd.shared.base.errors import CkptdError, ProtocolError
from ckptd.shared.base.ids import JobKey
from ckptd.shared.files.spare_pages import limit_met
from ckptd.shared.format.integrity import XXH3, Keyed
from ckptd.shared.protocol.publication import Intent, Intents
from ckptd.store import commit
from ckptd.store.drain import drain
from ckptd.store.files import FileLayer
from ckptd.store.identity import OpenedStore, check_store, open_store
from ckptd.store.in_the_way import in_the_way
from ckptd.store.incarnations import claim, take
from ckptd.store.messages import (
    DAEMON,
    WORKER,
    Claim,
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
)
from ckptd.store.other_jobs import other_jobs
from ckptd.store.parity import drain_parity
from ckptd.store.publish import publish_left, publish_own_part
from ckptd.store.scan import save_at, scan
from ckptd.system import failpoints
from ckptd.system.niceness import Niceness

_THREADS = 6  # requests at once: a hung one leaves five
_RECEIVE_NBYTES = 1 << 20
_PROGRESS_PERIOD_S = 0.1
_PR_SET_PDEATHSIG = 1
_KEEP_FEWER = "to keep fewer from now on: CKPTD_KEEP_LAST=1, or keep_last = 1 in the daemon's configuration"
_HINTS = {
    errno.ENOSPC: f"free space on the store, such as ckptd prune STORE/JOB --keep-last 1; {_KEEP_FEWER}",
    errno.EDQUOT: f"{limit_met(errno.EDQUOT)}; {_KEEP_FEWER}",
    errno.EFBIG: limit_met(errno.EFBIG),
    errno.ENOENT: "is it mounted? ckptd makes the store's own directory, never the one above it",
    errno.ENOTDIR: "the store must be a directory: set store to another path",
    errno.ELOOP: "its links lead in a circle: set store to the directory itself",
    errno.ENAMETOOLONG: "a part of its path is too long for the file system: set store to a shorter one",
    errno.EACCES: "the daemon's user must read and write there: check owner and mode of the store",
    errno.EPERM: "the daemon's user must read and write there: check owner and mode of the store",
    errno.EROFS: "the store is mounted read-only: remount it, or set store to another path",
    errno.ESTALE: "the mount went away under the daemon: remount the store",
    errno.EBUSY: "somebody still reads it, over NFS perhaps: what is left is removed when the job starts again",
    errno.EIO: "the file system reports a device error: see its logs; the drain is tried again",
}


class Worker:
    """Carries out requests of one daemon on one store, several at once."""

    def __init__(self, sock: socket.socket, root: str, fs: FileLayer) -> None:
        self._sock = sock
        self._root = root
        self._fs = fs
        self._sending = threading.Lock()
        self._pool = ThreadPoolExecutor(_THREADS)

    def serve(self) -> None:
        """Returns when the daemon closes its end; requests may still be running in threads. Raises ProtocolError."""
        self._sock.sendall(hello_frame())
        frames = FrameReader(decode_request, theirs=DAEMON, ours=WORKER)
        while data := self._sock.recv(_RECEIVE_NBYTES):
            for request in frames.feed(data):
                if isinstance(request, UseKey):
                    self._fs.integrity = Keyed(request.key)
                else:
                    self._pool.submit(self._answer, request)

    def _answer(self, request: Request) -> None:
        try:
            self._send(self._carry_out(request))
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, "")
            text, hint = in_the_way(error, self._root) or (str(error), _HINTS.get(error.errno or 0, ""))
            self._send(Failed(request.id, "os", name, text, hint))
        except CkptdError as error:
            self._send(Failed(request.id, error.code, "", error.message, error.hint))
        except Exception as error:  # noqa: BLE001  # whatever it is, the daemon must get its one answer
            self._send(Failed(request.id, "bug", "", f"{type(request).__name__}: {error!r}", "please report this"))
        if isinstance(request, Drain):
            failpoints.reach("drain.reported")

    def _carry_out(self, request: Request) -> Done:  # noqa: C901 - one line per request
        match request:
            case Drain():
                failpoints.reach("drain.ordered")
                check_store(self._fs, self._root, request.store_id)
                return Done(request.id, drain(self._fs, self._root, request, self._reporter(request.id)))
            case DrainParity():
                check_store(self._fs, self._root, request.store_id)
                drain_parity(self._fs, self._root, request)
                return Done(request.id)
            case WriteVote(vote=vote):
                check_store(self._fs, self._root, vote.store_id)
                failpoints.reach("commit.before-vote")
                commit.write_vote(self._fs, self._key(vote.job), vote)
                failpoints.reach("commit.after-vote")
                return Done(request.id)
            case Commit(job=job, save=save, writer=writer, by=by, intents=intents):
                return Done(request.id, commit.commit(self._fs, self._key(job), save, writer, by, _by_save(intents)))
            case Publish():
                return Done(request.id, self._publish(request))
            case TakeIncarnation(job=job, by=taker):
                opened, key = self._open(request), self._key(job)
                return Done(request.id, Taken(take(self._fs, key, taker, request.at_least, request.until), opened))
            case ScanJob(job=job, claim=made_up):
                opened, key = self._open(request), self._key(job)
                lost = made_up is not None and bool(opened.store_id) and not self._claim(key, made_up)
                found = scan(self._fs, key)
                others = [] if found.committed or found.partials else other_jobs(self._fs, key)
                return Done(request.id, Scanned(opened, found, lost, others))
            case RemoveCheckpoint(job=job, save=save, intents=intents):
                gone = commit.remove_checkpoint(self._fs, self._key(job), save, _by_save(intents))
                return Done(request.id, Removed(pinned=not gone))
            case RemovePartial(job=job, save=save):
                commit.remove_partial(self._fs, self._key(job), save)
                return Done(request.id)
            case SweepTrash(job=job):
                commit.sweep_trash(self._fs, self._key(job))
                return Done(request.id)
            case Probe():
                return Done(request.id, Space(*self._fs.space(self._root)))
            case _:
                assert_never(request)

    def _open(self, request: TakeIncarnation | ScanJob) -> OpenedStore:
        return open_store(
            self._fs,
            self._root,
            request.job,
            remembered=request.remembered,
            wanted=request.wanted,
            make=request.make if isinstance(request, ScanJob) else True,
            exact=isinstance(request, ScanJob),  # a number is for ranks that connect, and are warned
        )

    def _claim(self, key: JobKey, made_up: Claim) -> bool:
        return claim(self._fs, key, made_up.incarnation, made_up.by)

    def _publish(self, order: Publish) -> Published:
        key, intents, save = self._key(order.job), _by_save(order.intents), order.own_part
        if save is None:
            return Published(*publish_left(self._fs, key, intents))
        note = publish_own_part(self._fs, key, save, intents)
        done = not note and save_at(self._fs, key, save.dirname) == save
        return Published([save] if done else [], [note] if note else [])

    def _key(self, job: str) -> JobKey:
        return JobKey(self._root, job)

    def _reporter(self, request_id: int) -> "_Reporter":
        return _Reporter(self, request_id)

    def report(self, request_id: int, done: Mapping[str, int]) -> None:
        """Progress sent to the daemon."""
        self._send(Progress(request_id, sum(done.values()), dict(done)))

    def _send(self, reply: Reply) -> None:
        frame = encode_frame(reply)
        try:
            with self._sending:
                self._sock.sendall(frame)
        except OSError:
            os._exit(0)  # the daemon is gone; nobody is left to tell


def _by_save(intents: list[Intent]) -> Intents:
    return {intent.save: intent.to for intent in intents}


class _Reporter:
    """Progress of one request, a few times a second. Called under the flow's lock, so never twice at once."""

    def __init__(self, worker: Worker, request_id: int) -> None:
        self._worker = worker
        self._id = request_id
        self._next_s = 0.0

    def __call__(self, done: Mapping[str, int]) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + _PROGRESS_PERIOD_S
            self._worker.report(self._id, done)


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
        Worker(socket.socket(fileno=fd), argv[4], FileLayer(argv[4], XXH3)).serve()  # until the daemon says UseKey
    except ProtocolError as error:
        print(f"ckptd store worker: {error}", file=sys.stderr)  # noqa: T201  # its daemon is of another version
        status = 1
    except ConnectionError:
        pass
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
