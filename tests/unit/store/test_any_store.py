"""What every kind of store does, by its interface alone: a new kind goes into ``KINDS``."""

import contextlib
import time

import msgspec
import pytest
import torch

from ckptd.checkpoint.export.run import Order, export
from ckptd.checkpoint.finish import finish
from ckptd.checkpoint.verify import verify_path
from ckptd.shared.base.errors import CkptdError, DamagedError, UsageError, WrongStoreError
from ckptd.shared.base.ids import ANY_STORE, JobKey, SaveId
from ckptd.shared.format.committed import EVERYTHING, Opened, open_committed
from ckptd.shared.format.integrity import XXH3, Keyed
from ckptd.shared.format.manifest import COMMITTED, Vote, decode_objects
from ckptd.shared.format.sealed_record import VERSION
from ckptd.shared.format.slot import align_up
from ckptd.shared.stores.kinds import open_files
from ckptd.store.facts import Committer, Taker
from ckptd.store.image import Flow, Image
from ckptd.store.opening import jobs_at, open_store
from ckptd.store.worker import other_jobs
from ckptd_client._load.foreign.load_from import load_from
from ckptd_client._local.rank import Group
from ckptd_client.dcp import CkptdReader
from tests import memory_store
from tests.checkpoints import image_of
from tests.runs import OTHER_RUN, OTHER_STORE_ID, RUN, SET, TAKER

OLD, SAVE, NEW = (SaveId(1, number, 100 * number, RUN) for number in (1, 2, 3))
JOB = "demo"


@contextlib.contextmanager
def directory(tmp_path):
    yield str(tmp_path / "store")


@contextlib.contextmanager
def memory(_tmp_path):
    with memory_store.registered():
        yield f"{memory_store.SCHEME}://bucket/store"


KINDS = {"a directory": directory, "memory": memory}


@pytest.fixture(params=KINDS)
def url(request, tmp_path):
    with KINDS[request.param](tmp_path) as found:
        yield found


@pytest.fixture(params=[XXH3, Keyed(b"k" * 32)], ids=["xxh3", "keyed"])
def integrity(request):
    return request.param


@pytest.fixture
def store(url, integrity):
    made = open_store(url, integrity)
    made.open(JOB)
    return made


def a_state(rank=0, shift=0.0):
    return {"weight": torch.arange(5000.0) + shift + rank, "epoch": 3}


def put(store, save, *, ranks=2, voting=None, job=JOB, shift=0.0, check=lambda: None):
    """The nodes' files and votes, one rank each; voting: how many nodes get as far as that."""
    for rank in range(ranks):
        state = a_state(rank, shift)
        image, record, objects = image_of(state, save, rank=rank, world_size=ranks, integrity=store.integrity)
        padded = memoryview(image.ljust(align_up(len(image)), b"\0"))
        files = [
            lambda name=name, start=start, nbytes=nbytes, padded=padded: contextlib.nullcontext(
                Image(name, nbytes, padded[start:], check)
            )
            for name, start, nbytes in record.extents()
        ]
        assert store.put_files(job, save, SET, files, Flow())
        if voting is not None and rank >= voting:
            continue
        found = decode_objects(objects, where="objects") if objects else None
        vote = Vote(
            version=VERSION, digest_kind=store.integrity.kind, store_id=store.store_id(), job=job, save=save,
            node=f"node{rank}", folder=SET, world_size=ranks, files=[record], stock_objects=found,
            key_id=store.integrity.key_id,
        )  # fmt: skip
        store.put_vote(job, vote)


def commit(store, save, **more):
    put(store, save, **more)
    return store.commit(more.get("job", JOB), save, "test")


def saves(store, job=JOB):
    return [entry.committed.save for entry in store.scan(job).committed]


def findings(store, save):
    return list(open_committed(Opened(open_files(store.where(JOB, save), store.integrity)), EVERYTHING))


# --- which store it is


def test_a_store_is_made_once_and_keeps_its_id(url):
    store = open_store(url, XXH3)
    assert store.store_id() is None
    assert store.open(JOB, make=False).store_id == ""
    made = store.open(JOB).store_id
    assert open_store(url, XXH3).open("another").store_id == made == store.store_id()
    store.check(made, "demo")
    with pytest.raises(WrongStoreError, match=f"{url} is not the store that this job was connected to"):
        store.check(OTHER_STORE_ID, "demo")


def test_no_store_is_made_where_another_one_is_remembered(url):
    store = open_store(url, XXH3)
    with pytest.raises(WrongStoreError, match=f"{url} is not the store that job 'demo' is saved to"):
        store.open(JOB, remembered=[OTHER_STORE_ID])
    with pytest.raises(WrongStoreError, match=f"{url} is gone"):
        store.check(OTHER_STORE_ID, "demo")
    assert store.store_id() is None
    assert store.open(JOB, remembered=[OTHER_STORE_ID], wanted=ANY_STORE).store_id == store.store_id()


def test_nothing_is_written_where_there_is_no_store(url):
    store = open_store(url, XXH3)
    with pytest.raises(OSError, match="No such file"):
        store.put_files(JOB, SAVE, SET, [], Flow())
    with pytest.raises(OSError, match="No such file"):
        store.take(JOB, TAKER)
    assert store.scan(JOB).committed == store.scan(JOB).partials == store.names(JOB) == []


# --- numbers


def test_numbers_are_had_once_and_are_above_every_trace_of_the_job(store):
    assert [store.take(JOB, TAKER), store.take(JOB, TAKER), store.take(JOB, TAKER, at_least=7)] == [1, 2, 7]
    put(store, SaveId(9, 1, 5, RUN), voting=0)
    assert store.take(JOB, TAKER) == 10
    assert [record.incarnation for record in store.scan(JOB).records] == [1, 2, 7, 10]
    with pytest.raises(CkptdError, match="too late"):
        store.take(JOB, TAKER, until=time.monotonic() - 1)
    assert store.take(JOB, TAKER) == 11


def test_a_claimed_number_is_the_first_ones(store):
    assert store.claim(JOB, 5, TAKER)
    assert store.claim(JOB, 5, TAKER)
    assert not store.claim(JOB, 5, Taker(OTHER_RUN, "another", "b"))
    assert store.take(JOB, TAKER) == 6


# --- a save


def test_a_save_is_seen_by_none_before_it_is_committed_and_by_everybody_afterwards(store):
    put(store, SAVE)
    (entry,) = store.scan(JOB).partials
    assert (entry.save, entry.voted, entry.finishable) == (SAVE, ["node0", "node1"], True)
    assert saves(store) == []
    outcome = store.commit(JOB, SAVE, "test")
    assert (outcome.committed.save, outcome.note, outcome.taken_over) == (SAVE, "", 0)
    assert saves(store) == [SAVE]
    assert store.scan(JOB).partials == []
    assert findings(store, SAVE) == []
    assert store.commit(JOB, SAVE, "another").committed == outcome.committed
    assert not store.put_files(JOB, SAVE, SET, [], Flow())


def test_a_save_that_lacks_a_vote_or_a_file_is_not_committed(store):
    put(store, SAVE, voting=1)
    assert "1 of 2 ranks have no vote: 1" in store.scan(JOB).partials[0].missing
    with pytest.raises(DamagedError):
        store.commit(JOB, SAVE, "test")
    assert saves(store) == []
    with pytest.raises(DamagedError):
        store.commit(JOB, NEW, "test")


def test_what_changes_while_it_is_put_is_not_there(store):
    def changed():
        raise UsageError("the slot holds something else")

    with pytest.raises(UsageError):
        put(store, SAVE, check=changed, voting=0)
    put(store, SAVE)
    assert store.commit(JOB, SAVE, "test").committed.save == SAVE


def test_a_commit_after_a_takeover_says_so(store):
    store.take(JOB, TAKER)
    put(store, SAVE)
    assert store.take(JOB, Taker(OTHER_RUN, "another", "b")) == 2
    by = Committer(1, TAKER.session, store.store_id())
    assert store.commit(JOB, SAVE, "test", by).taken_over == 2
    assert store.standings(JOB)[0][SAVE.dirname].superseded == 2


def test_a_commit_in_another_store_is_refused(store):
    put(store, SAVE)
    with pytest.raises(WrongStoreError):
        store.commit(JOB, SAVE, "test", Committer(1, TAKER.session, OTHER_STORE_ID))
    assert saves(store) == []


# --- what goes, and what stays


def test_the_newest_stays_and_what_is_pinned(store):
    for save in (OLD, SAVE, NEW):
        commit(store, save)
    assert store.pin(JOB, OLD.dirname)
    assert not store.pin(JOB, OLD.dirname)
    standings, problems = store.standings(JOB)
    assert problems == []
    assert [name for name, standing in standings.items() if standing.pinned] == [OLD.dirname]
    assert [name for name, standing in standings.items() if standing.latest] == [NEW.dirname]
    assert all(abs(standing.committed_at.timestamp() - time.time()) < 600 for standing in standings.values())
    assert not store.remove(JOB, OLD)
    assert store.remove(JOB, SAVE)
    assert store.remove(JOB, SAVE)
    with pytest.raises(CkptdError, match="is the newest"):
        store.remove(JOB, NEW)
    assert saves(store) == [NEW, OLD]
    assert store.pin(JOB, OLD.dirname, pinned=False)
    assert not store.pin(JOB, OLD.dirname, pinned=False)
    assert store.remove(JOB, OLD)
    with pytest.raises(UsageError):
        store.pin(JOB, OLD.dirname)
    assert store.names(JOB) == [NEW.dirname]
    assert store.sweep(JOB) == []


def test_an_unfinished_save_goes_and_a_committed_one_does_not(store):
    commit(store, SAVE)
    put(store, NEW)
    store.discard(JOB, NEW)
    store.discard(JOB, NEW)
    store.discard(JOB, SAVE)
    assert (saves(store), store.scan(JOB).partials) == ([SAVE], [])


# --- jobs, commands and readers


def test_jobs_are_found_by_their_location(store):
    assert other_jobs(store, "dmeo") == []
    commit(store, SAVE)
    assert jobs_at(store.url) == jobs_at(f"{store.url}/{JOB}") == [JobKey(store.url, JOB)]
    assert other_jobs(store, "dmeo") == ["demo (step 200)"]
    with pytest.raises(UsageError, match="is one checkpoint"):
        jobs_at(store.where(JOB, SAVE))
    free, total = store.space()
    assert 0 < free <= total
    assert list(store.probe())[-1]["finished"]


def test_commands_read_it(store, tmp_path):
    put(store, SAVE)
    (finished,) = finish(JobKey(store.url, JOB), "test", integrity=store.integrity)
    assert (finished.committed, finished.path) == (True, store.where(JOB, SAVE))
    for location in (store.url, f"{store.url}/{JOB}", store.where(JOB, SAVE)):
        report = verify_path(location, integrity=store.integrity)
        assert (report.ok, report.checked, report.notes) == (True, [store.where(JOB, SAVE)], [])
    order = Order(source=f"{store.url}/{JOB}", out=str(tmp_path / "model"), integrity=store.integrity)
    assert export(order).step == SAVE.step
    assert not verify_path(store.where(JOB, NEW), integrity=store.integrity).ok


def test_a_training_reads_it(store):
    commit(store, SAVE)
    where = store.where(JOB, SAVE)
    for rank, world in ((0, 2), (1, 2), (0, 1), (2, 3)):
        state = a_state(shift=-1.0)
        kind, step, _, _ = load_from(where, state, Group(rank, world, "test"), integrity=store.integrity)
        like = rank if rank < 2 else 0
        assert (kind, step) == ("ckptd", SAVE.step)
        assert torch.equal(state["weight"], a_state(like)["weight"])


def test_dcp_reads_it(url):
    store = open_store(url, XXH3)
    store.open(JOB)
    commit(store, SAVE)
    reader = CkptdReader(store.where(JOB, SAVE), integrity="xxh3")
    assert "weight" in reader.read_metadata().state_dict_metadata
    assert (reader.step, reader.tier) == (SAVE.step, "pfs")
    reader.close()


def test_damage_is_found_and_named(store):
    commit(store, SAVE)
    files = open_files(store.where(JOB, SAVE), store.integrity)
    record = msgspec.json.decode(files.read(COMMITTED, 1 << 20))
    assert record["job"] == JOB
    other = open_files(store.where(JOB, SAVE), Keyed(b"o" * 32))
    with pytest.raises(CkptdError):
        load_from(other.location, a_state(), Group(0, 2, "test"), integrity=other.integrity)


LOCATION = "nowhere://bucket/store/demo/step-000000100.i0001"


@pytest.mark.parametrize(
    "read",
    [
        lambda: open_store(LOCATION, XXH3),
        lambda: jobs_at(LOCATION),
        lambda: verify_path(LOCATION),
        lambda: export(Order(source=LOCATION, out="/nowhere")),
        lambda: load_from(LOCATION, a_state(), Group(0, 1, "test")),
        lambda: CkptdReader(LOCATION).read_metadata(),
    ],
    ids=["a store", "jobs", "verify", "export", "load_from", "CkptdReader"],
)
def test_a_kind_of_store_that_does_not_exist(read):
    with pytest.raises(UsageError, match=r"nowhere://.*: ckptd has no store for nowhere://") as caught:
        read()
    assert "a path" in caught.value.hint
