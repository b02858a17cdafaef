"""One checkpoint, one verdict: every reader refuses it by the same class of error and the same file's name."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from ckptd.checkpoint.repair.run import rebuild
from ckptd.checkpoint.verify import verify_path
from ckptd.shared.base.errors import CkptdError, DamagedError, UsageError
from ckptd.shared.base.ids import JobKey, SaveId, parse_dirname
from ckptd.shared.format.manifest import COMMITTED, STOCK_METADATA
from ckptd.store.posix.commit import commit
from ckptd.system.files import FileLayer
from ckptd_client._load.foreign.load_from import load_from as read_into
from ckptd_client._load.rounds import read_checkpoint
from ckptd_client._local.rank import Group
from ckptd_client.dcp import CkptdReader
from tests.checkpoints import SAVE, write_checkpoint
from tests.hostile import forge
from tests.hostile import reader as hostile
from tests.hostile.forge import RANK0
from tests.records import take
from tests.runs import MANIFEST, RUN, TAKER, VOTES, manifest_in, vote_in

pytestmark = pytest.mark.timeout(120)
RANK1 = "r00001-p00.safetensors"
OTHER = SaveId(1, 2, 20, RUN)
RANKS = 2


def some_state(rank=0, shift=0.0):
    """A tensor that all ranks have, and one of the rank alone."""
    return {"weight": torch.arange(2000.0) + rank + shift, f"own{rank}": torch.arange(9.0) + rank + shift, "epoch": 3}


# --- the readers: each returns its notes, or raises. rebuild comes last: it mends what it can


def verify(path):
    report = verify_path(path)
    if report.problems:
        raise DamagedError("\n".join(map(str, report.problems)))
    assert report.ok
    return ""


def load(path):
    """Of a whole job: one rank that cannot read is enough."""
    notes = []
    for rank in range(RANKS):
        state = some_state(rank, -9.0)
        fitted, _, told = read_checkpoint(path, state, group=Group(rank, RANKS, "test"))
        fitted.finish(state)
        notes += told
        assert torch.equal(state["weight"], some_state(rank)["weight"])
    return "\n".join(notes)


def load_from(path):
    """Reads the images and votes that it needs: so the state wants a tensor of each rank's image."""
    state = some_state(0, -9.0) | some_state(1, -9.0)
    notes = read_into(path, state, Group(0, RANKS, "test"))[3]
    for rank in range(RANKS):
        assert torch.equal(state[f"own{rank}"], some_state(rank)[f"own{rank}"])
    return "\n".join(notes)


def plugin(path):
    """What DCP makes of an exception is text; so its steps are taken here, for a tensor of each rank's image."""
    state = {f"own{rank}": some_state(rank, -9.0)[f"own{rank}"] for rank in range(RANKS)}
    reader, planner = CkptdReader(path), DefaultLoadPlanner()
    try:
        planner.set_up_planner(state, reader.read_metadata(), is_coordinator=True)
        reader.read_data(planner.create_local_plan(), planner).wait()
    finally:
        reader.close()
    for rank in range(RANKS):
        assert torch.equal(state[f"own{rank}"], some_state(rank)[f"own{rank}"])
    return "\n".join(reader.notes)


def mend(path):
    outcome = rebuild(path)
    if outcome.damaged:
        raise DamagedError("\n".join(outcome.damaged), hint="mended")
    return "\n".join(outcome.notes)


def finish(path):
    """The commit of the save that the name claims: it is done already, or something else is in its place."""
    store, job, name = path.rsplit("/", 2)
    step, incarnation = parse_dirname(name)
    counter = OTHER.counter if step == OTHER.step else SAVE.counter
    return commit(FileLayer(), JobKey(store, job), SaveId(incarnation, counter, step, RUN), "test").note


READERS = {
    "verify": verify, "list": hostile.listing, "export": hostile.export, "load": load, "load_from": load_from,
    "CkptdReader": plugin, "commit": finish, "rebuild": mend,
}  # fmt: skip
ALL = frozenset(READERS)
RECORDS = ALL - {"list", "commit"}  # what opens the manifest
BY_PATH = RECORDS  # what takes any path
VERIFY = frozenset({"verify"})


# --- the faults


class Fault(NamedTuple):
    """make: given the checkpoint, returns the path to read. file: that each refusal names. by: who must refuse."""

    make: Callable[[Path], Path]
    by: frozenset[str]
    file: str
    error: type[CkptdError] = DamagedError


FAULTS: dict[str, Fault] = {}


def fault(name, by, file, error=DamagedError):
    def keep(make):
        FAULTS[name] = Fault(lambda final: make(final) or final, by, file, error)
        return make

    return keep


def add(name, by, file, make, error=DamagedError):
    fault(name, by, file, error)(make)


def other_checkpoint(final):
    return write_checkpoint(final.parents[1], [some_state(rank) for rank in range(RANKS)], save=OTHER)


def to(final, name):
    return final.rename(final.with_name(name))


@fault("renamed to another step", ALL, COMMITTED)
def _(final):
    return to(final, OTHER.dirname)


@fault("copied to another step", ALL, COMMITTED)
def _(final):
    return Path(shutil.copytree(final, final.with_name(OTHER.dirname)))


@fault("renamed to another incarnation", ALL, COMMITTED)
def _(final):
    return to(final, SaveId(2, 1, SAVE.step, RUN).dirname)


@fault("copied into another job", ALL, COMMITTED)
def _(final):
    key = JobKey(str(final.parents[1]), "other")
    take(FileLayer(), key, TAKER)
    return Path(shutil.copytree(final, final.parents[1] / "other" / final.name))


@fault("COMMITTED of another step", ALL, COMMITTED)
def _(final):
    shutil.copy(other_checkpoint(final) / COMMITTED, final / COMMITTED)


@fault("manifest of another save", RECORDS, MANIFEST)
def _(final):
    other = manifest_in(other_checkpoint(final))
    assert other.stat().st_size == manifest_in(final).stat().st_size, "list looks at the size"
    shutil.copy(other, manifest_in(final))


@fault("COMMITTED and manifest of another save", ALL, COMMITTED)
def _(final):
    manifest_in(final).unlink()
    for path in (other_checkpoint(final) / COMMITTED, manifest_in(other_checkpoint(final))):
        shutil.copy(path, final)


add("COMMITTED missing", ALL, COMMITTED, lambda final: os.unlink(final / COMMITTED))
add("manifest missing", ALL, MANIFEST, lambda final: os.unlink(manifest_in(final)))
for _name in (RANK0, RANK1):
    add(f"{_name} missing", RECORDS, _name, lambda final, name=_name: os.unlink(final / name))
add("a byte behind COMMITTED", ALL, COMMITTED, lambda final: append(final / COMMITTED, b"x"))
add("a byte behind the manifest", ALL, MANIFEST, lambda final: append(manifest_in(final), b"x"))
add("a byte behind an image", RECORDS, RANK1, lambda final: append(final / RANK1, b"x"))
add("a byte less of an image", RECORDS, RANK1, lambda final: os.truncate(
    final / RANK1, (final / RANK1).stat().st_size - 1))  # fmt: skip
for _what in ("fifo", "directory", "device", "nowhere", "outside"):
    add(f"{_what} as COMMITTED", ALL, COMMITTED, lambda final, w=_what: forge.instead(final / COMMITTED, w))
    add(f"{_what} as manifest", ALL, MANIFEST, lambda final, w=_what: forge.instead(manifest_in(final), w))
    add(f"{_what} as image", RECORDS, RANK1, lambda final, w=_what: forge.instead(final / RANK1, w))
    add(f"{_what} as vote", RECORDS, VOTES[1], lambda final, w=_what: forge.instead(vote_in(final, 1), w))


def append(path, data):
    with open(path, "ab") as file:
        file.write(data)


@fault("images swapped between ranks", RECORDS, "r0000")
def _(final):
    one, two = final / RANK0, final / RANK1
    assert one.stat().st_size == two.stat().st_size
    one.rename(final / "x")
    two.rename(one)
    (final / "x").rename(two)


def manifest(name, change, by=RECORDS):
    add(f"manifest with {name}", by, MANIFEST, lambda final: forge.edit_manifest(final, change))


def record(title, **said):
    def make(final):
        forge.edit_record(final, 0, lambda raw: raw.update(said))

    add(f"vote with {title}", RECORDS, VOTES[0], make)


manifest("a rank twice", lambda raw: raw["votes"][1].__setitem__(4, [0, 1]))
manifest("another number of ranks", lambda raw: raw.update(world_size=3))
record("a file of another part", name="r00000-p01.safetensors")
record("parts that do not add up", parts=[4096, 4096])
manifest("another job", lambda raw: raw.update(job="other"))
manifest("another step", lambda raw: raw["save"].__setitem__(2, 11))
manifest("a vote twice", lambda raw: raw["votes"].append(raw["votes"][0]))
manifest("a stock file twice", lambda raw: raw["stock"].append(raw["stock"][0]))


@fault("COMMITTED with another text of the save", ALL, COMMITTED)
def _(final):
    forge.edit_committed(final, lambda raw: raw.update(save_id=OTHER.text))


for _field in ("files", "nbytes", "world_size"):
    add(f"COMMITTED with more {_field}", RECORDS, COMMITTED, lambda final, field=_field: forge.edit_committed(
        final, lambda raw: raw.update({field: raw[field] + 1})))  # fmt: skip

add("a vote missing", RECORDS, VOTES[1], lambda final: os.unlink(vote_in(final, 1)))
add("a vote damaged", RECORDS, VOTES[1], lambda final: append(vote_in(final, 1), b"x"))
add("a vote of another node", RECORDS, VOTES[1], lambda final: shutil.copy(
    vote_in(final), vote_in(final, 1)) and None)  # fmt: skip
add("a stock file missing", VERIFY, STOCK_METADATA, lambda final: os.unlink(final / STOCK_METADATA))
add("a stock file longer", VERIFY, STOCK_METADATA, lambda final: append(final / STOCK_METADATA, b"x"))


@fault("half removed", BY_PATH, ".trash-", UsageError)
def _(final):
    return to(final, f".trash-{final.name}-0123456789ab")


@fault("not renamed yet", BY_PATH, SAVE.partial_dirname, UsageError)
def _(final):
    return to(final, SAVE.partial_dirname)


NOT_BY_NAME = {"half removed", "not renamed yet"}  # list and commit find checkpoints by their names


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    store = tmp_path_factory.mktemp("sound")
    take(FileLayer(), JobKey(str(store), "demo"), TAKER)
    return write_checkpoint(store, [some_state(rank) for rank in range(RANKS)])


@pytest.fixture
def final(sound, tmp_path):
    store = tmp_path / "store"
    shutil.copytree(sound.parents[1], store, symlinks=True)
    return store / "demo" / sound.name


def verdict(reader, path):
    try:
        return None, READERS[reader](str(path))
    except CkptdError as error:
        return error, str(error)


@pytest.mark.parametrize("reader", READERS)
def test_a_sound_one_is_read(reader, final):
    assert verdict(reader, final) == (None, "")


@pytest.mark.parametrize("name", FAULTS)
def test_all_readers_agree(name, final):
    """Those that a fault does not concern read on, and none of them says that it is another's fault."""
    path, wrong = FAULTS[name].make(final), []
    for reader in READERS:
        if name in NOT_BY_NAME and reader not in BY_PATH:
            continue
        error, text = verdict(reader, path)
        concerned = reader in FAULTS[name].by
        if concerned and (error is None or FAULTS[name].file not in text):
            wrong.append(f"{reader} does not refuse it by the name {FAULTS[name].file}: {text}")
        elif concerned and reader not in {"verify", "list"} and type(error) is not FAULTS[name].error:
            wrong.append(f"{reader}: {type(error).__name__}: {text}")
        elif concerned and reader not in {"verify", "list"} and not error.hint:
            wrong.append(f"{reader} does not say what to type: {text}")
        elif not concerned and error is not None:
            wrong.append(f"{reader} is not concerned: {text}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ["a vote missing", "a vote damaged", "fifo as vote"])
def test_a_damaged_vote_concerns_the_ranks_of_its_node_alone(name, final):
    path = str(FAULTS[name].make(final))
    state = some_state(0, -9.0)
    fitted, _, _ = read_checkpoint(path, state, group=Group(0, RANKS, "test"))
    fitted.finish(state)
    assert torch.equal(state["weight"], some_state(0)["weight"])
    with pytest.raises(DamagedError, match=VOTES[1]):
        read_checkpoint(path, some_state(1), group=Group(1, RANKS, "test"))


@pytest.mark.parametrize("reader", sorted(BY_PATH))
@pytest.mark.parametrize("where", ["handed-over", f"handed-over/{SAVE.dirname}", "run 7/final"])
def test_a_name_that_claims_nothing_is_no_fault(reader, where, final, tmp_path):
    """Whoever is given a checkpoint may call it what they like, and need not keep it in a job's directory."""
    copied = shutil.copytree(final, tmp_path / "data" / where)
    assert verdict(reader, copied) == (None, "")


@pytest.mark.parametrize("reader", sorted(BY_PATH))
def test_a_link_is_what_it_leads_to(reader, final):
    assert (final.parent / "latest").is_symlink()
    assert verdict(reader, final.parent / "latest") == (None, "")
    other = final.with_name(OTHER.dirname)
    other.symlink_to(final.name)
    assert verdict(reader, other) == (None, "")
