"""A real worker process: drains real slots, reports, fails with words, and goes when its daemon goes."""

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from ckptd import __version__
from ckptd.checkpoint.verify import verify_path
from ckptd.shared.base.errors import ProtocolError, UnknownMessageError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.slot import SlotState
from ckptd.store import worker_link
from ckptd.store.messages import (
    DAEMON,
    VERSION,
    WORKER,
    Commit,
    Done,
    Drain,
    Drained,
    DrainFile,
    Failed,
    FrameReader,
    Hello,
    Probe,
    Progress,
    RemoveCheckpoint,
    RemovePartial,
    Reply,
    Request,
    ScanJob,
    SweepTrash,
    TakeIncarnation,
    WriteVote,
    decode_reply,
    decode_request,
    encode_frame,
    hello_frame,
)
from ckptd.store.worker_link import StoreLink, WorkerDiedError
from tests.runs import COMMITTER, RUN, SET, STORE_ID, TAKER, give_id
from tests.slots import Slot, make_vote, other_save, reseal, some_tensors, write_slot

SAVE = SaveId(1, 1, 100, RUN)
DEADLINE_S = 20


@pytest.fixture
def shm() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


@pytest.fixture
def link(tmp_path) -> Iterator[StoreLink]:
    give_id(tmp_path)
    link = StoreLink(str(tmp_path))
    yield link
    link.kill()
    wait_gone(link)


def wait_gone(link: StoreLink) -> int:
    end = time.monotonic() + DEADLINE_S
    while (status := link.poll()) is None:
        assert time.monotonic() < end
        time.sleep(0.005)
    return status


def replies(link: StoreLink, wanted: int) -> list[Reply]:
    """All replies until that many requests are answered."""
    found: list[Reply] = []
    poller = select.poll()
    while sum(not isinstance(reply, Progress) for reply in found) < wanted:
        poller.register(link, select.POLLIN | (select.POLLOUT if link.wants_write else 0))
        assert poller.poll(DEADLINE_S * 1000)
        link.on_writable()
        found += link.receive()
    return found


def ask(link: StoreLink, request: Request) -> Reply:
    link.send(request)
    reply = replies(link, 1)[-1]
    assert reply.id == request.id
    return reply


def done(link: StoreLink, request: Request):
    reply = ask(link, request)
    assert isinstance(reply, Done), reply
    return reply.result


def slots_of(link: StoreLink, shm: Path, save: SaveId, count: int = 2, nbytes: int = 100_000) -> list[Slot]:
    key = JobKey(link.store, "demo")
    tensors = [some_tensors(nbytes, seed) for seed in range(count)]
    return [
        write_slot(shm / f"{save.counter}-{n}.slot", key, save, tensors[n], rank=n, world_size=count)
        for n in range(count)
    ]


def order(slots: list[Slot], save: SaveId = SAVE, **more) -> Drain:
    files = [DrainFile(slot.path, slot.layout.file, 0, len(slot.image)) for slot in slots]
    return Drain(id=7, store_id=STORE_ID, job="demo", save=save, folder=SET, files=files, **more)


def save_all(link: StoreLink, shm: Path, save: SaveId) -> None:
    slots = slots_of(link, shm, save)
    done(link, order(slots, save))
    vote = make_vote(JobKey(link.store, "demo"), save, "node0", slots, world_size=len(slots))
    done(link, WriteVote(id=2, vote=vote))
    done(link, Commit(id=3, job="demo", save=save, writer="test", by=COMMITTER))


def test_a_checkpoint_from_slots_to_committed_to_removed(link, shm, tmp_path) -> None:
    assert done(link, TakeIncarnation(id=1, job="demo", by=TAKER)).incarnation == 1
    assert done(link, Probe(id=1)).free_nbytes > 0
    save_all(link, shm, SAVE)
    report = verify_path(str(tmp_path))
    assert report.ok, report.problems
    assert done(link, order(slots_of(link, shm, SAVE))) == Drained(0, 0.0, committed=True)
    newer = SaveId(1, 2, 101, RUN)
    save_all(link, shm, newer)
    done(link, RemoveCheckpoint(id=4, job="demo", save=SAVE))
    done(link, SweepTrash(id=5, job="demo"))
    done(link, order(slots_of(link, shm, SaveId(1, 3, 102, RUN)), SaveId(1, 3, 102, RUN)))
    found = done(link, ScanJob(id=6, job="demo")).scan
    assert [entry.committed.save for entry in found.committed] == [newer]
    assert [partial.missing for partial in found.partials] == ["no votes"]
    done(link, RemovePartial(id=8, job="demo", save=SaveId(1, 3, 102, RUN)))
    assert not done(link, ScanJob(id=9, job="demo")).scan.partials


def test_progress_grows_to_all_the_bytes_at_a_capped_rate(link, shm) -> None:
    slots = slots_of(link, shm, SAVE, count=1, nbytes=50 << 20)
    link.send(order(slots, bytes_per_s=100 << 20))
    *progress, last = replies(link, 1)
    assert isinstance(last, Done)
    assert last.result.nbytes == len(slots[0].image)
    assert last.result.seconds > 0.4
    seen = [reply.nbytes_done for reply in progress]
    assert 2 <= len(seen) <= 8
    assert seen == sorted(seen)
    status = Path(f"/proc/{link.pid}/status").read_text()
    own_kib = sum(int(line.split()[1]) for line in status.splitlines() if line.startswith(("RssAnon", "RssFile")))
    assert own_kib < 50 << 10


def test_a_drain_takes_up_where_a_failed_one_stopped(link, shm, tmp_path) -> None:
    slots = slots_of(link, shm, SAVE)
    os.rename(slots[1].path, slots[1].path + ".away")
    failed = ask(link, order(slots))
    assert isinstance(failed, Failed)
    assert failed.errno == "ENOENT"
    assert slots[1].path in failed.message
    os.rename(slots[1].path + ".away", slots[1].path)
    assert done(link, order(slots)).nbytes == sum(len(slot.image) for slot in slots)


@pytest.mark.parametrize("how", ["other save", "free", "other job", "other length"])
def test_a_slot_of_something_else_is_not_drained(link, shm, tmp_path, how) -> None:
    (slot,) = slots_of(link, shm, SAVE, count=1)
    seals = {
        "other save": other_save(slot.seal, 101),
        "free": msgspec.structs.replace(slot.seal, state=SlotState.FREE),
        "other job": msgspec.structs.replace(slot.seal, job=JobKey(link.store, "other")),
        "other length": msgspec.structs.replace(slot.seal, image_nbytes=1),
    }
    reseal(slot, seals[how])
    reply = ask(link, order([slot]))
    assert isinstance(reply, Failed)
    assert reply.code == "slot-changed"
    assert slot.path in reply.message
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_slot_that_changes_hands_while_it_is_drained_gives_no_file(link, shm, tmp_path) -> None:
    (slot,) = slots_of(link, shm, SAVE, count=1, nbytes=40 << 20)
    link.send(order([slot], bytes_per_s=60 << 20))
    while not link.receive():  # the first progress: it is at it
        select.select([link], [], [], DEADLINE_S)
    reseal(slot, other_save(slot.seal, 101))
    reply = replies(link, 1)[-1]
    assert isinstance(reply, Failed)
    assert reply.code == "slot-changed"
    assert not [path for path in tmp_path.rglob("*") if path.name == slot.layout.file]


def test_a_store_that_is_not_there_or_no_directory(shm, tmp_path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for name, error in (("no/where", "ENOENT"), ("file", "ENOTDIR")):
        link = StoreLink(str(tmp_path / name))
        for request in (TakeIncarnation(id=1, job="demo", by=TAKER), order(slots_of(link, shm, SAVE))):
            reply = ask(link, request)
            assert isinstance(reply, Failed)
            missing = isinstance(request, Drain) and error == "ENOENT"  # what has no id is not the store
            assert (reply.code, reply.errno) == (("wrong-store", "") if missing else ("os", error))
            assert "store" in reply.hint or "mount" in reply.hint
        link.kill()
        wait_gone(link)


def test_a_full_store(shm, tmp_path) -> None:
    # A file size limit of the process stands in for a full disk: EFBIG instead of ENOSPC, by the same way.
    limit = "import resource,runpy,sys,signal;signal.signal(signal.SIGXFSZ,signal.SIG_IGN);"
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE,(65536,65536));"
    wrapper = tmp_path / "python"
    wrapper.write_text(
        f"#!{sys.executable}\n{limit}sys.argv=sys.argv[3:];runpy.run_module('ckptd.store.worker',run_name='__main__')\n"
    )
    wrapper.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(wrapper))
        give_id(tmp_path)
        link = StoreLink(str(tmp_path))
    reply = ask(link, order(slots_of(link, shm, SAVE)))
    assert isinstance(reply, Failed)
    assert reply.errno == "EFBIG"
    assert "ulimit -f" in reply.hint
    assert isinstance(ask(link, ScanJob(id=1, job="demo")), Done)  # and it goes on
    link.kill()
    wait_gone(link)


def test_a_hung_request_does_not_hold_up_others(link, shm) -> None:
    (slow,) = slots_of(link, shm, SAVE, count=1, nbytes=40 << 20)
    link.send(order([slow], bytes_per_s=1 << 20))  # takes half a minute
    assert isinstance(ask_past_progress(link, Probe(id=99)), Done)


def ask_past_progress(link: StoreLink, request: Request) -> Reply:
    link.send(request)
    return next(reply for reply in replies(link, 1) if reply.id == request.id)


def test_a_large_vote_goes_through_a_socket_that_is_full(link, shm) -> None:
    save = SAVE
    slots = slots_of(link, shm, save)
    done(link, order(slots, save))
    key = JobKey(link.store, "demo")
    record = msgspec.structs.replace(slots[0].record, leaves=bytes(20 << 20))
    vote = make_vote(key, save, "node0", slots, world_size=2)
    link.send(WriteVote(id=2, vote=msgspec.structs.replace(vote, files=[record, *vote.files[1:]])))
    assert link.wants_write
    assert isinstance(replies(link, 1)[-1], Done)
    assert not link.wants_write


def test_a_killed_worker_is_seen_and_named(link) -> None:
    os.kill(link.pid, signal.SIGKILL)
    wait_gone(link)
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        link.receive()
    link.send(Probe(id=1))
    assert not link.wants_write
    with pytest.raises(WorkerDiedError):
        link.receive()


def test_a_worker_ends_at_the_end_of_its_socket_also_while_it_is_busy(link, shm) -> None:
    (slow,) = slots_of(link, shm, SAVE, count=1, nbytes=40 << 20)
    link.send(order([slow], bytes_per_s=1 << 20))
    link._sock.close()
    assert wait_gone(link) == 0


def test_a_worker_outlives_ctrl_c_but_not_its_daemon(tmp_path) -> None:
    code = (
        "import sys, select; sys.path[:0] = sys.argv[2:]\n"
        "from ckptd.store.worker_link import StoreLink; from ckptd.store.messages import Probe\n"
        "link = StoreLink(sys.argv[1]); link.send(Probe(id=1)); select.select([link], [], [])\n"
        "print(link.pid, flush=True)\n"
        "import os; os.set_inheritable(link.fileno(), True)\n"
        "import subprocess; keep = subprocess.Popen(['sleep', '60'], close_fds=False); print(keep.pid, flush=True)\n"
        "sys.stdin.read()"
    )
    root = str(Path(__file__).parents[3])
    daemon = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), root], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert daemon.stdin
    assert daemon.stdout
    pid, keeper = int(daemon.stdout.readline()), int(daemon.stdout.readline())
    os.kill(pid, signal.SIGINT)
    time.sleep(0.05)
    assert running(pid)
    daemon.kill()  # the keeper holds the daemon's end of the socket open, so that only the parent's death can tell
    daemon.wait()
    end = time.monotonic() + DEADLINE_S
    while running(pid):
        assert time.monotonic() < end
        time.sleep(0.005)
    os.kill(keeper, signal.SIGKILL)
    daemon.stdin.close()
    daemon.stdout.close()


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


# -- frames --


def reply_reader() -> FrameReader[Reply]:
    return FrameReader(decode_reply, theirs=WORKER, ours=DAEMON)


def test_frames_come_whole_however_the_stream_is_cut() -> None:
    sent: list[Reply] = [Progress(1, 2), Failed(3, "os", "EIO", "m" * 300, "h"), Done(4)]
    stream = b"".join([hello_frame(), *map(encode_frame, sent)])
    for step in (1, 7, len(stream)):
        reader, found = reply_reader(), []
        for start in range(0, len(stream), step):
            found += reader.feed(stream[start : start + step])
        assert found == sent


def test_malformed_frames_are_refused() -> None:
    with pytest.raises(ProtocolError, match="exceeds"):
        reply_reader().feed(b"\xff" * 8)
    with pytest.raises(ProtocolError, match="malformed request"):
        decode_request(b"\x80")
    with pytest.raises(ProtocolError, match="malformed reply"):
        decode_reply(b"\xa4text")
    with pytest.raises(UnknownMessageError):
        decode_reply(encode_frame(Probe(id=1))[4:])  # a request is no reply
    with pytest.raises(ProtocolError, match="malformed request"):
        decode_request(encode_frame(ScanJob(id=1, job="../up"))[4:])


UNKNOWN = b"\x81\xa4type\xa3foo"


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (encode_frame(Hello(VERSION + 1, "9.9")), f"its store worker (protocol {VERSION + 1}, ckptd 9.9) cannot speak"),
        (encode_frame(Done(1)), "its store worker does not begin with its version"),
        (frame(b"\xc1"), "its store worker does not begin with its version"),
        (
            hello_frame() + frame(UNKNOWN),
            f"message 'foo' of its store worker (protocol {VERSION}, ckptd {__version__})",
        ),
    ],
)
def test_a_worker_of_another_version_is_refused_and_both_are_named(first: bytes, said: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        reply_reader().feed(first)
    assert said in caught.value.message
    assert f"the daemon (protocol {VERSION}, ckptd {__version__})" in caught.value.message
    assert "restart the daemon" in caught.value.hint


def another_version(root: Path, protocol: int) -> dict[str, str]:
    """The environment of a daemon whose code on disk has been replaced by that of another version."""
    shutil.copytree(Path(__file__).parents[3] / "ckptd", root / "ckptd", ignore=shutil.ignore_patterns("__pycache__"))
    for name, old, new in (
        ("__init__.py", f'__version__ = "{__version__}"', '__version__ = "9.9"'),
        ("store/messages.py", f"\nVERSION = {VERSION}\n", f"\nVERSION = {protocol}\n"),
    ):
        text = (root / "ckptd" / name).read_text()
        assert text.count(old) == 1
        (root / "ckptd" / name).write_text(text.replace(old, new))
    return os.environ | {"PYTHONPATH": str(root)}


def test_a_worker_that_was_replaced_on_disk_is_reported_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = another_version(tmp_path / "new", VERSION + 1)
    monkeypatch.setattr(worker_link, "environment", lambda: environment)
    link = StoreLink(str(tmp_path))
    try:
        link.send(Probe(id=1))
        with pytest.raises(WorkerDiedError) as caught:
            replies(link, 1)
        text = str(caught.value)
        assert f"its store worker (protocol {VERSION + 1}, ckptd 9.9) cannot speak with the daemon" in text
        assert f"(protocol {VERSION}, ckptd {__version__})" in text
        assert "restart the daemon" in text
        assert wait_gone(link) == 1  # it has seen the same, and ended
    finally:
        link.kill()
