"""A FUSE store that hands O_DIRECT on to the disk behind it: what is written there is read again, by every reader.

Such a server goes on with the file as it was opened, whatever fcntl(2) says of the descriptor later.
"""

import os
import threading
from pathlib import Path

import pytest
import torch

from ckptd.checkpoint.verify import verify_path
from ckptd.doctor.probe_store import probe_store
from ckptd.doctor.rules import Verdict, judge_store
from ckptd.shared.files.regular import open_direct, read_pages
from ckptd_client._load.foreign.load_from import load_from
from ckptd_client._local.rank import Group
from tests.checkpoints import write_checkpoint
from tests.faults.mounts import FuseStore, needs_fuse
from tests.faults.ranks import JOB, MB, Ranks, told
from tests.hostile import reader as hostile
from tests.hostile.reader import some_state

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240), needs_fuse]
PAGE = 4096
READERS = ["load", "load_two", "load_from", "plugin", "verify", "export", "export_dcp", "rebuild"]


@pytest.fixture(name="fuse")
def fixture_fuse(tmp_path: Path):
    with FuseStore(str(tmp_path), "forwarding") as fuse:
        yield fuse


def test_the_store_does_what_it_is_there_for(fuse: FuseStore):
    """It refuses what the flag was taken off from, and takes what was opened anew."""
    path = Path(fuse.path) / "file"
    path.write_bytes(b"x" * PAGE)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        with pytest.raises(OSError, match="Invalid argument"):
            os.pread(fd, PAGE, 0)
    finally:
        os.close(fd)
    assert path.read_bytes() == b"x" * PAGE


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("reader", READERS)
def test_what_verify_calls_whole_is_read(reader, fuse: FuseStore):
    behind = write_checkpoint(os.path.join(fuse.behind, "store"), [some_state(boxes=False)])
    final = os.path.join(fuse.path, "store", "demo", behind.name)
    assert verify_path(final).ok
    assert hostile.READERS[reader](final) == ""
    into = {"tied": torch.zeros(4, 3)}
    load_from(final, into, Group(0, 1, "test"))
    assert torch.equal(into["tied"], some_state(boxes=False)["tied"])


def test_a_job_saves_to_it_and_loads_from_it(fuse: FuseStore, tmp_path: Path):
    with told(fuse.path, logs=str(tmp_path)) as node:
        node.start()
        with Ranks(node, nbytes=8 * MB) as ranks:
            ranks.call("connect")
            ranks.call("save", 1)
            assert ranks.call("wait", 1, timeout_s=30) == [("durable", "durable")]
            ranks.call("close")
        node.stop()
        for path in Path(node.arena).glob("jobs/*/*.slot"):
            path.unlink()
        node.start()
        with Ranks(node, nbytes=8 * MB) as ranks:
            ranks.call("connect")
            (found,) = ranks.call("load")
            assert (found["step"], found["tier"], found["intact"]) == (1, "pfs", True)
    assert verify_path(f"{fuse.behind}/{JOB}").problems == []


def test_threads_that_read_one_file_all_get_its_bytes(fuse: FuseStore):
    """One of them has the descriptor's file opened again under the others."""
    data = os.urandom(64 * PAGE + 17)
    (Path(fuse.behind) / "file").write_bytes(data)
    fd = open_direct(os.path.join(fuse.path, "file"))
    found: dict[int, bytes] = {}

    def read(start: int) -> None:
        view = memoryview(bytearray(17 * PAGE))
        nbytes = read_pages(fd, view, start, min(16 * PAGE + 17, len(data) - start))
        found[start] = bytes(view[:nbytes])

    threads = [threading.Thread(target=read, args=(16 * PAGE * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(fd)
    assert found == {16 * PAGE * i: data[16 * PAGE * i :][: 16 * PAGE + 17] for i in range(4)}


def test_doctor_reads_back_as_a_restore_does(fuse: FuseStore):
    facts = probe_store(fuse.path)
    assert (facts.finished, facts.error, facts.read_error) == (True, "", "")
    assert facts.direct_error == "Invalid argument"


def test_doctor_finds_a_store_that_a_restore_could_not_read(tmp_path: Path):
    with FuseStore(str(tmp_path), "sticky") as fuse:
        facts = probe_store(fuse.path)
        assert facts.read_error
        found = {finding.name: finding for finding in judge_store(facts)}
        assert found["store read"].verdict == Verdict.BAD
