"""The same forgeries where a training meets them: a daemon that scans the store, and client.load."""

import os
import shutil

import pytest

import ckptd_client
from ckptd.cli import invoke
from ckptd.shared.base.errors import CkptdError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.manifest import decode_vote
from ckptd.store.posix import commit, removal
from ckptd.store.posix.scan import Place, scan
from ckptd.system.files import FileLayer
from tests.checkpoints import image_of, put_image, put_vote, write_checkpoint
from tests.cluster import Node
from tests.hostile import forge
from tests.hostile.apart import apart
from tests.hostile.cases import ALL, CASES, DEEP, LOAD, MARKER
from tests.hostile.reader import some_state
from tests.runs import RUN, vote_in
from tests.unit.client.same import difference

pytestmark = pytest.mark.timeout(300)
LONG = os.environ.get("FAULTS") == "long"
REFUSED = [(name, case) for name, case in CASES.items() if LOAD in case.by]
TAKEN = REFUSED[:: 1 if LONG else 6]  # test_checkpoints.py gives load itself all of them


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(MARKER, str(tmp_path / "marker"))
    yield
    assert not (tmp_path / "marker").exists()


def test_load_refuses_each_and_the_daemon_lives(tmp_path):
    """A checkpoint that list would not show is none, so there is nothing to restore; any other is an error."""
    wrong = []
    os.mkdir(tmp_path / "store")
    with Node(str(tmp_path / "store")) as node:
        node.start()
        for number, (name, case) in enumerate(TAKEN):
            job, state = f"job-{number}", some_state()
            case.make(write_checkpoint(node.store, [some_state()], job=job))
            with ckptd_client.connect(job, store=node.store, arena=node.arena, start=False) as client:
                try:
                    restored = client.load(state)
                except ckptd_client.RestoreError as error:
                    if not str(error):
                        wrong.append(f"{name}: says nothing")
                    continue
            if restored is not None or case.by != ALL or difference(state, some_state()):
                wrong.append(f"{name}: {restored}")
        assert node.daemon.poll() is None, node.log_text()
    assert not wrong, "\n".join(wrong)


# --- unfinished saves: what a daemon, or the next one, would commit


def cut(path):
    path.write_bytes(path.read_bytes()[:-40])


def edit_vote(path, **changes):
    raw = forge.plain(decode_vote(path.read_bytes(), where="vote"))
    raw["files"][0] |= changes.pop("record", {})
    forge.put_vote(path, forge.sealed(forge.msgspec.msgpack.encode(forge.shared(raw | changes))))


CHANGES = {
    "cut": cut,
    "deep": lambda path: forge.put_vote(path, forge.sealed(DEEP)),
    "counts huge": lambda path: forge.put_vote(path, forge.sealed(b"\x81\xa5files\xdd\xff\xff\xff\xff")),
    "of another node": lambda path: edit_vote(path, node="node7"),
    "of another job": lambda path: edit_vote(path, job="other"),
    "of another save": lambda path: edit_vote(path, save=[1, 1, 11]),
    "for a file outside": lambda path: edit_vote(path, record={"name": "../../r00000-p00.safetensors"}),
    "for another rank's file": lambda path: edit_vote(path, record={"name": "r00001-p00.safetensors"}),
    "for a larger file": lambda path: edit_vote(path, record={"nbytes": 1 << 20, "digests": bytes(16)}),
    "ranks huge": lambda path: edit_vote(path, world_size=1 << 20),
    "pipe": lambda path: forge.instead(path, "fifo"),
    "device": lambda path: forge.instead(path, "device"),
    "directory": lambda path: forge.instead(path, "directory"),
    "terabyte": lambda path: os.truncate(path, 1 << 40),
}


@pytest.fixture
def partial(tmp_path):
    """The hidden directory of a save whose votes are all in."""
    (tmp_path / "store").mkdir()
    place = Place(JobKey(str(tmp_path / "store"), "demo"), SaveId(1, 1, 10, RUN))
    image, record, _ = image_of(some_state(), place.save)
    put_image(place, record, image)
    put_vote(place, [record], world_size=1, node="node0", objects=None)
    return place


@pytest.mark.parametrize("name", CHANGES)
def test_what_such_votes_add_up_to_is_never_committed(partial, name):
    path = vote_in(partial.partial)
    assert scan(FileLayer(), partial.key).partials[0].finishable
    CHANGES[name](path)
    with pytest.raises((CkptdError, OSError), match=r"node0|r0000|1 of 1048576 ranks"):
        commit.commit(FileLayer(), partial.key, partial.save, "test")
    found = scan(FileLayer(), partial.key)
    assert not found.committed
    if name != "for a larger file":  # what is found out at the commit
        assert not found.partials[0].finishable
    assert invoke(["list", partial.key.store]) == 0
    assert invoke(["verify", partial.key.store]) in (0, 1, 2)


# --- the names of a job's directory


def test_links_lead_none_astray(tmp_path):
    """latest, and a checkpoint that is a link: read at most, and when it is removed the link alone goes."""
    final = write_checkpoint(tmp_path / "store", [some_state()], save=SaveId(1, 1, 10, RUN))
    job, latest = final.parent, final.parent / "latest"
    far = write_checkpoint(tmp_path / "far", [some_state()], save=SaveId(7, 9, 900, RUN))
    key = JobKey(str(tmp_path / "store"), "demo")
    for target in (str(far), "../../far/demo/" + far.name, "latest", "/dev/zero", "..", "", "\n"):
        latest.unlink()
        latest.symlink_to(target or "nothing")
        assert invoke(["list", str(job)]) == 0
        assert invoke(["verify", str(job)]) == 0
        write_checkpoint(tmp_path / "store", [some_state()], save=SaveId(1, 2, 20, RUN))
        assert os.readlink(latest) == "step-000000020.i0001"  # set right by the next commit
        shutil.rmtree(job / "step-000000020.i0001")
    far = write_checkpoint(tmp_path / "far", [some_state()], save=SaveId(0, 9, 900, RUN))
    (job / far.name).symlink_to(far)
    names = sorted(os.listdir(far))
    removal.remove_checkpoint(FileLayer(), key, SaveId(0, 9, 900, RUN))
    assert sorted(os.listdir(far)) == names
    assert not os.path.lexists(job / far.name)


def test_a_time_that_no_calendar_has(tmp_path):
    final = write_checkpoint(tmp_path, [some_state()])
    os.utime(final / "COMMITTED", (1 << 33, 1 << 33))
    assert invoke(["list", str(tmp_path)]) == 0


def test_a_vote_of_a_million_ranks_takes_no_memory(partial):
    """By its word alone."""
    path = vote_in(partial.partial)
    CHANGES["ranks huge"](path)
    came = apart(lambda: scan(FileLayer(), partial.key).partials[0].missing)
    assert came.text.startswith("1048575 of 1048576 ranks have no vote: 1, 2, 3, 4, ..")
    assert came.grown < 16 << 20, came
