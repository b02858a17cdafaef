"""A job's journal on any kind of store: in order, bounded, and never a lie for a byte that flipped."""

import os
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.shared.format.integrity import XXH3
from ckptd.shared.protocol import journal as log
from ckptd.shared.protocol.messages import End, Tier
from ckptd.store import journal
from ckptd.store.journal import Journal, put_segment, read_journal
from ckptd.store.opening import open_store
from tests.runs import OTHER_RUN, RUN
from tests.unit.store.test_any_store import JOB, KINDS

ALL = [
    log.RunBegan(
        at=1.0, incarnation=3, run=RUN, world_size=16, nodes=2, coordinator="a", scheme="xor", set_size=2,
        drain_every="10", version="0.1",
    ),
    log.Staged(at=2.0, counter=1, step=10, nbytes=1 << 40, seconds=0.5, stall_s=0.1, mean_stall_s=0.05, late_nbytes=7),
    log.Protected(at=3.0, counter=1, seconds=1.0),
    log.Durable(at=4.0, counter=1, seconds=2.0, drain_s=1.5, nbytes=1 << 40, tries=2),
    log.Durable(at=4.0, counter=1, seconds=2.0, drain_s=1.5, nbytes=1 << 40, incarnation=2),
    log.Ended(at=5.0, counter=2, step=20, end=End.FAILED, reason="EIO"),
    log.Lost(at=6.0, node="b", what="node", ranks=8),
    log.Restored(
        at=7.0, incarnation=2, counter=1, step=10, seconds=3.0, tiers={Tier.PEER: 8, Tier.ARENA: 8}, nbytes=9, newest=12
    ),
    log.Damaged(
        at=7.5, incarnation=2, counter=1, step=10, node="b", tier=Tier.PFS, rank=3, what="digest", mended="parity"
    ),
    log.Steps(at=8.0, step=30),
    log.Problem(at=9.0, text="drain failed", times=3),
    log.Missing(at=10.0, records=4),
    log.RunEnded(at=11.0, how="closed"),
]  # fmt: skip
CONTENT = log.segment(map(log.framed, ALL))
assert {type(entry) for entry in ALL} == set(log.Entry.__args__)


def began(incarnation=1, run=RUN, at=1.0, **more):
    return log.RunBegan(at=at, incarnation=incarnation, run=run, world_size=1, nodes=1, coordinator="a", **more)


def named(number=1, *, incarnation=1, run=RUN, writer="00000001"):
    return log.Name(incarnation, log.run_digits(run), writer, number)


def put(store, name, *entries, first=True):
    put_segment(store.records(JOB), name, log.segment(map(log.framed, entries)), first=first)


@pytest.fixture(params=KINDS)
def store(request, tmp_path):
    with KINDS[request.param](tmp_path) as url:
        made = open_store(url, XXH3)
        made.open(JOB)
        yield made


def test_what_is_put_is_read(store):
    name = named(incarnation=3)
    put_segment(store.records(JOB), name, CONTENT, first=True)
    assert read_journal(store.files(JOB)) == Journal(ALL, 0)
    assert log.parse_name(name.text) == name


def test_a_job_without_a_journal_has_nothing_on_record(store):
    assert read_journal(store.files(JOB)) == Journal([], 0)


def test_a_segment_is_put_again_whole_and_others_stay(store):
    put(store, named(), began())
    put(store, named(), began(), log.Steps(at=2, step=1), first=False)
    put(store, named(2), began(at=3.0, again=True))
    assert [entry.at for entry in read_journal(store.files(JOB)).entries] == [1, 2, 3]


def test_runs_and_writers_come_in_the_order_in_which_they_wrote(store):
    put(store, named(incarnation=2), began(2, at=50.0))
    put(store, named(writer="ffffffff"), began(at=1.0))
    put(store, named(2, writer="ffffffff"), began(at=2.0, again=True))
    put(store, named(writer="00000000"), began(at=3.0, again=True))
    assert [entry.at for entry in read_journal(store.files(JOB)).entries] == [1, 2, 3, 50]


def test_a_segment_of_another_run_and_a_file_that_is_none_are_counted_and_not_believed(store):
    put(store, named(), began(run=OTHER_RUN), log.Steps(at=2, step=1))
    put(store, named(2), began(2), log.Steps(at=2, step=1))
    records = store.records(JOB)
    records.put(f"{log.JOURNAL_DIR}/notes.txt", b"hello")
    records.put(named(3).path, b"no magic")
    records.put(named(4).path, CONTENT[:-3])
    records.put(named(5).path, bytes(log.MAX_SEGMENT_NBYTES + 1))
    assert read_journal(store.files(JOB)) == Journal([], 7), "one is torn too"


def test_all_segments_of_a_job_stay_below_their_bound_and_the_oldest_go(store):
    record = log.framed(log.Problem(at=1.0, text="x" * 512))
    full = log.segment([log.framed(began()), *[record] * (log.SEGMENT_NBYTES // len(record))])
    records, most = store.records(JOB), log.MAX_JOURNAL_NBYTES // len(full)
    for number in range(1, most + 10):
        put_segment(records, named(number), full, first=True)
        if number > most - 3:
            names = records.files.names(log.JOURNAL_DIR)
            assert sum(records.files.size(f"{log.JOURNAL_DIR}/{name}") for name in names) <= log.MAX_JOURNAL_NBYTES
    numbers = [log.parse_name(name).number for name in names]
    assert numbers == list(range(numbers[0], most + 10))
    assert len(numbers) > most - 4


def test_many_short_runs_are_bounded_too(store, monkeypatch):
    monkeypatch.setattr(journal, "MAX_SEGMENTS", 5)
    for incarnation in range(1, 12):
        put(store, named(incarnation=incarnation), began(incarnation, at=float(incarnation)))
    assert [entry.incarnation for entry in read_journal(store.files(JOB)).entries] == [7, 8, 9, 10, 11]


def test_what_a_killed_process_left_beside_a_segment_goes_after_a_while(tmp_path):
    store = open_store(str(tmp_path), XXH3)
    store.open(JOB)
    put(store, named(), began())
    folder = tmp_path / JOB / log.JOURNAL_DIR
    for name, age_s in ((".a.tmp-1", 2 * 3600), (".b.tmp-2", 60)):
        (folder / name).write_bytes(b"x")
        os.utime(folder / name, (time.time() - age_s,) * 2)
    put(store, named(2), began(again=True))
    assert sorted(os.listdir(folder)) == sorted([".b.tmp-2", named().text, named(2).text])
    assert read_journal(store.files(JOB)).damaged == 0


def test_nothing_else_that_a_store_does_with_a_job_touches_its_journal(store):
    put(store, named(incarnation=3), *ALL)
    assert store.scan(JOB).problems == store.scan(JOB).strange == []
    assert store.names(JOB) == []
    assert not store.has_job(JOB), "it is no checkpoint"
    assert store.sweep(JOB) == []
    assert store.standings(JOB) == ({}, [])
    assert read_journal(store.files(JOB)) == Journal(ALL, 0)


@settings(max_examples=300, deadline=None)
@given(at=st.integers(0, len(CONTENT) - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_is_counted_and_what_is_read_is_what_was_written(at, bit):
    content = bytearray(CONTENT)
    content[at] ^= 1 << bit
    found, damaged = log.read_segment(bytes(content))
    assert damaged
    assert all(entry in ALL for entry in found)


@settings(max_examples=200, deadline=None)
@given(stop=st.integers(0, len(CONTENT) - 1))
def test_a_torn_segment_has_what_came_before_and_the_rest_is_counted(stop):
    found, damaged = log.read_segment(CONTENT[:stop])
    assert found == ALL[: len(found)]
    whole = len(log.segment(map(log.framed, found))) == stop
    assert damaged == (not whole)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400), st.booleans())
def test_any_bytes_are_read_without_an_error(data, magic):
    found, _ = log.read_segment((log.MAGIC if magic else b"") + data)
    assert found == []
