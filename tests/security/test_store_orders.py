"""A store that somebody else can write to names files of this user's: whoever opens it writes and removes none of them.

The other user is a real one. What it forges is the index of a trainer's files, links for directories, and directories
that are swapped for links while this user is at work in them.
"""

import contextlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import ckptd_client
from ckptd.shared.base.errors import CkptdError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.committed import TRASH_PREFIX
from ckptd.shared.format.manifest import STOCK_FILES, UNPUBLISHED
from ckptd.shared.format.slot import align_up
from ckptd.shared.protocol.journal import MAGIC, Name
from ckptd.shared.protocol.publication import Publication
from ckptd.store.image import Flow, Image
from ckptd.store.journal import put_segment, read_journal
from ckptd.store.posix import commit, removal
from ckptd.store.posix.image_writer import make_set, write_image
from ckptd.store.posix.publish import publish
from ckptd.store.posix.records import PosixRecords
from ckptd.store.posix.scan import Place, files_at
from ckptd.store.votes import read_node, voting_places
from ckptd.system.files import FileLayer
from tests import pythons
from tests.checkpoints import image_of, put_image, put_vote, write_checkpoint
from tests.cluster import Node, wait_for
from tests.long_form import LONG
from tests.records import pin, take, unpin
from tests.runs import RUN, SET, TAKER, vote_in
from tests.security.others import STRANGER, acting_as, as_user, needs_root

pytestmark = [needs_root, pytest.mark.faults, pytest.mark.timeout(240)]
EVIL = "ssh-ed25519 AAAA of somebody else"


def below(directory: Path) -> dict[str, str | bytes]:
    """All names below, with content."""
    found: dict[str, str | bytes] = {}
    for folder, folders, names in os.walk(directory):
        for name in folders:
            found[os.path.relpath(os.path.join(folder, name), directory)] = "a directory"
        for name in names:
            path = os.path.join(folder, name)
            found[os.path.relpath(path, directory)] = os.readlink(path) if os.path.islink(path) else _read(path)
    return found


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


@pytest.fixture(name="ground")
def fixture_ground():
    """Where both users are: pytest's own directories let nobody else pass."""
    ground = Path(tempfile.mkdtemp(prefix="ckptd-test-"))
    ground.chmod(0o755)
    yield ground
    shutil.rmtree(ground)


@pytest.fixture(name="home")
def fixture_home(ground):
    """Of the user who opens stores."""
    home = ground / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "authorized_keys").write_text("ssh-ed25519 AAAA mine")
    (home / ".bashrc").write_text("mine")
    home.chmod(0o700)
    return home


def give_away(path: Path) -> None:
    """All of it is the other user's from now on, and open to everybody."""
    for folder, folders, names in os.walk(path):
        for name in (*folders, *names):
            os.chown(os.path.join(folder, name), STRANGER, STRANGER, follow_symlinks=False)
    os.chown(path, STRANGER, STRANGER)


# -- what a store says of where to --


def orders(home: Path, shared: Path) -> dict[str, dict[str, object]]:
    """Each a forged index: the trainer's name of a file, and where to."""
    return {
        "single file": {"name": ".bashrc", "directory": str(home), "whole": False},
        "whole directory": {"name": "authorized_keys", "directory": str(home / ".ssh"), "whole": True},
        "new directory": {"name": "x.service", "directory": str(home / ".config" / "systemd"), "whole": True},
        "pointer alone": {
            "name": "",
            "directory": str(shared / "a"),
            "pointer": str(home / ".ssh" / "authorized_keys"),
        },
        "through a link": {"name": "authorized_keys", "directory": str(shared / "run"), "whole": False},
        "up and over": {"name": "../home/.bashrc", "directory": str(shared), "whole": False},
    }


ORDERS = tuple(orders(Path("/"), Path("/")))


def forge(checkpoint: Path, *, name: str, directory: str, whole: bool = True, pointer: str = "") -> None:
    """The index says so in every form that it ever had, and that it is still to be done."""
    part = next(path for path in checkpoint.iterdir() if path.suffix == ".bin")
    part.write_text(EVIL)
    to = {"directory": directory, "whole": whole, "pointer": pointer, "text": EVIL}
    index = json.loads((checkpoint / STOCK_FILES).read_text())
    index |= {"files": {name: part.name} if name else {}, "publication": to, "saved_for": to, "to": to}
    (checkpoint / STOCK_FILES).write_text(json.dumps(index))
    (checkpoint / UNPUBLISHED).touch()


@pytest.fixture(name="sound", scope="module")
def fixture_sound(tmp_path_factory):
    """A store with two checkpoints of a trainer's files, the older of which retention would remove."""
    folder = tmp_path_factory.mktemp("sound")
    with Node(str(folder / "store")) as node:
        os.makedirs(node.store)
        node.start()
        with as_lone_rank():
            client = ckptd_client.connect("job", store=node.store, arena=node.arena, start=False)
            for step in (1, 2):
                client.save_files({"a": b"of a trainer"}, step, directory=folder / f"out{step}").wait("durable", 60)
            client.close()
    return folder / "store" / "job"


@contextlib.contextmanager
def as_lone_rank():
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WORLD_SIZE", "RANK"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(name="forged")
def fixture_forged(sound, home, ground, request):
    """The same, forged, and the other user's."""
    shared = ground / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    as_user(os.symlink, str(home / ".ssh"), str(shared / "run"))
    job = ground / "store" / "job"
    copy(sound.parent, ground / "store")
    for checkpoint in job.glob("step-*"):
        forge(checkpoint, **orders(home, shared)[request.param])
    give_away(ground / "store")
    return job


def ckptd(*args: str) -> str:
    done = pythons.run([sys.executable, "-m", "ckptd", *args], capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("forged", ORDERS, indirect=True)
def test_no_verb_writes_where_a_store_says(forged, home):
    before = below(home)
    for verb in (["list"], ["verify"], ["commit"], ["prune", "--keep-last", "1"]):
        ckptd(*verb, str(forged))
    ckptd("pin", str(forged / "step-000000001.i0001"))
    assert below(home) == before


@pytest.mark.parametrize("forged", ORDERS, indirect=True)
def test_no_session_writes_where_a_store_says(forged, home, ground):
    """One that connects, loads, saves, drains, commits, and retires what is older: all that a daemon does."""
    before = below(home)
    with Node(str(forged.parent)) as node, as_lone_rank():
        node.start("--keep-last", "1")
        client = ckptd_client.connect("job", store=str(forged.parent), arena=node.arena, start=False)
        for step in (None, 1):
            try:
                files = client.load_files(step)
            except CkptdError:
                continue
            if files is not None:
                files.close()
        state = {"a": torch.zeros(3)}
        for checkpoint in forged.glob("step-*"):
            with pytest.raises(CkptdError):
                client.load_from(checkpoint, state)
        for step in (7, 8, 9):
            client.save_files({"a": b"1"}, step, directory=ground / "out" / f"{step}").wait("durable", 60)
        wait_for(lambda: "ckptd publish" in node.log_text())
        told = node.job("job").errors
        client.close()
    assert any("--to DIRECTORY" in text for text in told), told
    assert below(home) == before
    assert (ground / "out" / "9" / "a").read_bytes() == b"1", "what a rank of the session has named"


# -- directories that are swapped for links meanwhile --

KEY_SAVE = SaveId(1, 3, 30, RUN)
PRIMITIVES = (
    "mkdir", "create_exclusive", "open_write", "fsync_dir", "rename", "link", "symlink", "readlink", "listdir",
    "open_read", "read_file", "size", "unlink", "rmdir",
)  # fmt: skip


class Swapped(FileLayer):
    """The other user does something before the n-th call on the disk."""

    def __init__(self, top: str, at: int, swap) -> None:
        super().__init__(top)
        self.state = [at]
        self.swap = swap


def _counted(name):
    def call(self, *args, **named):
        self.state[0] -= 1
        if self.state[0] == -1:
            self.swap()
        return getattr(FileLayer, name)(self, *args, **named)

    return call


for _name in PRIMITIVES:
    setattr(Swapped, _name, _counted(_name))


def put_link(directory: str, target: str, beside: str) -> None:
    """As the other user: the directory, which may be gone, is a link from now on."""
    with acting_as():
        try:
            os.rename(directory, beside)
        except OSError:
            return  # it is not there at this call
        os.symlink(target, directory)


def copy(tree: Path | str, to: Path | str) -> None:
    """With the modes of all files, and links as links."""
    shutil.copytree(tree, to, symlinks=True)


@pytest.fixture(name="place")
def fixture_place(ground):
    """A job on a store where everybody may write, with two checkpoints and one that is to be committed."""
    top = ground / "group"
    for number in (1, 2):
        write_checkpoint(top, [{"a": torch.ones(3)}], save=SaveId(1, number, number, RUN))
    found = Place(JobKey(str(top), "demo"), KEY_SAVE)
    image, record, _ = image_of({"a": torch.ones(3)}, KEY_SAVE)
    put_image(found, record, image)
    put_vote(found, [record], world_size=1, node="node0", objects=None)
    for folder, _, _ in os.walk(top):
        Path(folder).chmod(0o777)
    return found


def a_commit(fs, place):
    commit.commit(fs, place.key, place.save, "test")


def a_removal(fs, place):
    removal.remove_checkpoint(fs, place.key, SaveId(1, 1, 1, RUN))


def a_removed_partial(fs, place):
    removal.remove_partial(fs, place.key, place.save)


def an_incarnation(fs, place):
    take(fs, place.key, TAKER)
    removal.sweep_trash(fs, place.key)


def a_pin(fs, place):
    pin(fs, place.key, SaveId(1, 1, 1, RUN).dirname)
    unpin(fs, place.key, SaveId(1, 1, 1, RUN).dirname)


def a_segment(fs, place):
    for number in (1, 2):
        put_segment(PosixRecords(fs, place.key), Name(1, "0" * 8, "0" * 8, number), MAGIC, first=True)
    read_journal(files_at(fs, place.job_dir))


def a_vote(fs, place):
    unfinished = files_at(fs, place.partial)
    for places in voting_places(unfinished):
        for voted in read_node(unfinished, place.key.job, place.save, places).votes:
            commit.write_vote(fs, place.key, voted.vote)


def a_drain(fs, place):
    image, record, _ = image_of({"a": torch.ones(3)}, place.save)
    make_set(fs, place, SET)
    padded = memoryview(image.ljust(align_up(len(image)), b"\0"))
    for name, start, nbytes in record.extents():
        write_image(fs, place, SET, Image(name, nbytes, padded[start:]), Flow())


WORK = {
    one.__name__: one
    for one in (a_commit, a_removal, a_removed_partial, an_incarnation, a_pin, a_segment, a_vote, a_drain)
}


def victim(which: str, place: Place) -> str:
    """A directory in which this user is at work."""
    old = Place(place.key, SaveId(1, 1, 1, RUN))
    sets = {"sets": os.path.join(place.partial, "sets"), "set": place.set_dir(SET)}
    found = {"job": place.job_dir, "partial": place.partial, **sets, "old": old.final}
    return found.get(which) or os.path.join(old.final, "sets")


UNFINISHED, OLD = ("partial", "sets", "set"), ("old", "old sets")
IN = dict.fromkeys(("a_commit", "a_removed_partial", "a_vote", "a_drain"), UNFINISHED)  # where a work is done, in short
IN |= dict.fromkeys(("a_removal", "an_incarnation", "a_pin", "a_segment"), OLD)


@pytest.mark.parametrize(
    ("work", "which"),
    [(work, which) for work in WORK for which in ("job", *UNFINISHED, *OLD) if LONG or which in ("job", *IN[work])],
)
def test_a_directory_that_is_swapped_for_a_link_leads_nowhere(work, which, place, home, ground):
    """At each call on the disk; the home has directories and files of the names that are written and removed."""
    vote = vote_in(place.partial).name
    for name in (
        "sets",
        SET,
        "step-000000001.i0001",
        ".incarnations",
        ".pins",
        ".journal",
        place.save.partial_dirname,
        ".trash-x",
    ):
        (home / name / "sets" / SET).mkdir(parents=True)
        (home / name / ".x.tmp-0").write_text("mine")
        (home / name / "sets" / SET / vote).write_text("mine")
    for name in ("COMMITTED", f"ckptd.{0:016x}.manifest", ".a.tmp-0", "node0", "r00000-p00.safetensors"):
        (home / name).write_text("mine")
    before = below(home)
    kept = ground / "kept"
    copy(place.key.store, kept)
    for at in range(60):
        spare = f"{place.key.store}/spare-{at}" if which == "job" else f"{place.job_dir}/spare-{at}"
        fs = Swapped(place.key.store, at, lambda spare=spare: put_link(victim(which, place), str(home), spare))
        with contextlib.suppress(OSError, CkptdError):
            WORK[work](fs, place)
        assert below(home) == before, f"at call {at}"
        if fs.state[0] >= 0:
            break  # the work has fewer calls
        shutil.rmtree(place.key.store)
        copy(kept, place.key.store)
    else:
        raise AssertionError("there are more calls than were looked at")


def test_trash_that_becomes_a_link_is_not_followed(place, home):
    """What is removed is listed first: a directory of it may be a link when its turn comes."""
    trash = Path(place.job_dir, f"{TRASH_PREFIX}x")
    (trash / "deep").mkdir(parents=True)
    (trash / "deep" / "x").touch()
    trash.chmod(0o777)
    (trash / "deep").chmod(0o777)
    before = below(home)

    def swap():
        put_link(str(trash / "deep"), str(home), str(trash / "spare"))

    for at in range(12):
        removal.sweep_trash(Swapped(place.key.store, at, swap), place.key)
        assert below(home) == before
        if not (trash / "deep").exists():
            (trash / "deep").mkdir(parents=True, exist_ok=True)
            (trash / "deep").chmod(0o777)
            trash.chmod(0o777)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("which", ["run", "run/best"])
def test_a_trainers_directory_that_is_swapped_for_a_link(which, whole, sound, home, ground):
    """Where a rank wanted its files; the other user may write beside it."""
    job = ground / "store" / "job"
    copy(sound.parent, ground / "store")
    text = json.loads((job / SaveId(1, 1, 1, RUN).dirname / STOCK_FILES).read_text())["save_id"]
    save = SaveId(1, 1, 1, bytes.fromhex(text.rpartition("-")[2]))
    assert save.text == text
    shared = ground / "shared"
    before = below(home)
    for at in range(80):
        shutil.rmtree(shared, ignore_errors=True)
        (shared / "run" / "best").mkdir(parents=True)
        for folder in (shared, shared / "run", shared / "run" / "best"):
            folder.chmod(0o777)
        (job / save.dirname / UNPUBLISHED).touch()
        to = Publication(str(shared / "run" / "best"), whole, str(shared / "run" / ".bashrc"), "evil", ("a", ".bashrc"))
        fs = Swapped(str(job.parent), at, lambda: put_link(str(shared / which), str(home), str(shared / "spare")))
        publish(fs, JobKey(str(job.parent), "job"), save, {save: to})
        assert below(home) == before, f"at call {at}"
        if fs.state[0] >= 0:
            return
    raise AssertionError("there are more calls than were looked at")
