"""Votes, manifest, COMMITTED: whole or refused."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.shared.base.errors import DamagedError, IntegrityError, UsageError
from ckptd.shared.base.ids import SaveId, file_name
from ckptd.shared.format import manifest as man
from ckptd.shared.format.committed_record import decode_committed, encode_committed, make_committed
from ckptd.shared.format.digest import BLOCK_NBYTES, KIND, digest
from ckptd.shared.format.rank_members import members_of
from ckptd.shared.format.replica_attestations import Attestation
from ckptd.shared.format.sealed_record import VERSION
from tests.runs import RUN, SET, STORE_ID
from tests.stored import voted

SAVE = SaveId(2, 3, 100, RUN)


def a_file(rank, nbytes=10):
    count = -(-nbytes // BLOCK_NBYTES)
    return man.FileRecord(
        name=file_name(rank),
        rank=rank,
        nbytes=nbytes,
        digests=b"d" * 16 * count,
        plan=b"p",
        form=b"f",
        own=b"o",
        leaves=b"v",
    )


def a_vote(node="n0", ranks=(0, 1), **words):
    vote = man.Vote(
        version=VERSION,
        digest_kind=KIND,
        store_id=STORE_ID,
        job="job",
        save=SAVE,
        node=node,
        folder=SET,
        world_size=2,
        files=[a_file(r) for r in ranks],
    )
    return voted(msgspec.structs.replace(vote, **words))


VOTES = [a_vote("n1", (1,)), a_vote("n0", (0,))]
MANIFEST = man.make_manifest(VOTES, save=SAVE, writer="test")
RAW = man.encode_record(MANIFEST)
COMMITTED = make_committed(MANIFEST, RAW)


def test_records_come_back():
    vote = VOTES[0].vote
    assert man.decode_vote(man.encode_record(vote), where="x") == vote
    assert man.decode_manifest(RAW, where="x") == MANIFEST
    assert decode_committed(encode_committed(COMMITTED), where="x") == COMMITTED
    assert COMMITTED.save == SAVE


def test_a_manifest_is_made_in_order_whatever_order_votes_come_in():
    assert [list(v.ranks) for v in MANIFEST.votes] == [[0], [1]]
    assert (MANIFEST.files, MANIFEST.nbytes) == (2, 20)
    assert [v.node for v in MANIFEST.votes] == ["n0", "n1"]
    assert man.encode_record(man.make_manifest(VOTES[::-1], save=SAVE, writer="test")) == RAW


def shared(content, *ranks):
    """Votes of which each has a slice of what two ranks hold."""
    said = {rank: Attestation(members_of((0, 1)), b"c" * 8, content[rank]) for rank in ranks}
    files = [msgspec.structs.replace(a_file(r), attestations=(said[r],) if r in said else ()) for r in (0, 1)]
    return [a_vote(f"n{rank}", files=[file]) for rank, file in enumerate(files)]


WHOLLY, IN_PART = b"a" + b"x" * 7, b"l" + b"x" * 7


@pytest.mark.parametrize(
    ("votes", "how_much"),
    [
        (shared([WHOLLY, WHOLLY], 0, 1), "all"),
        (shared([IN_PART, IN_PART], 0, 1), "window"),
        (shared([WHOLLY, IN_PART], 0, 1), "window"),
        (shared([WHOLLY, WHOLLY], 0), "window"),  # an older daemon recorded nothing
        (VOTES, ""),
    ],
)
def test_committed_says_how_much_replicas_compared_by_the_votes_alone(votes, how_much):
    manifest = man.make_manifest(votes, save=SAVE, writer="test")
    raw = man.encode_record(manifest)
    assert man.decode_manifest(raw, where="x") == manifest
    committed = make_committed(manifest, raw)
    assert committed.replicas == how_much
    assert decode_committed(encode_committed(committed), where="x") == committed


def test_votes_of_replicas_that_differ_make_no_manifest():
    with pytest.raises(DamagedError, match="no replicas"):
        man.make_manifest(shared([WHOLLY, b"a" + b"y" * 7], 0, 1), save=SAVE, writer="test")


def another_story():
    """A vote that says of rank 1's file what the others do not."""
    other = msgspec.structs.replace(a_file(1), leaves=b"other")
    return a_vote("n2", (1,), files=[other])


def test_a_rank_with_two_votes_that_agree_has_one_file():
    manifest = man.make_manifest([*VOTES, a_vote("n2", (1,))], save=SAVE, writer="test")
    assert [ref.node for ref in manifest.votes] == [*(ref.node for ref in MANIFEST.votes), "n2"]
    assert [list(ref.ranks) for ref in manifest.votes] == [[0], [1], []]


@pytest.mark.parametrize(
    "votes",
    [
        [],
        VOTES[:1],
        [*VOTES, another_story()],
        [VOTES[0], a_vote("n0", (0,), job="other")],
        [VOTES[0], a_vote("n0", (0,), world_size=3)],
        [VOTES[0], a_vote("n0", (0,), save=SaveId(2, 4, 100, RUN))],
    ],
    ids=["none", "missing", "twice", "job", "world", "save"],
)
def test_votes_that_do_not_add_up(votes):
    with pytest.raises(DamagedError, match="votes for step 100"):
        man.make_manifest(votes, save=SAVE, writer="test")


@given(at=st.integers(0, len(RAW) - 1), bit=st.integers(0, 7))
def test_any_flipped_bit_of_a_manifest_is_found(at, bit):
    broken = bytearray(RAW)
    broken[at] ^= 1 << bit
    with pytest.raises(DamagedError, match=r"^here"):
        man.decode_manifest(bytes(broken), where="here")


@given(st.integers(0, len(RAW) - 1))
def test_any_truncation_of_a_manifest_is_found(length):
    with pytest.raises(DamagedError):
        man.decode_manifest(RAW[:length], where="x")


def test_a_vote_is_no_manifest_and_the_other_way_round():
    with pytest.raises(DamagedError):
        man.decode_manifest(man.encode_record(VOTES[0].vote), where="x")
    with pytest.raises(DamagedError):
        man.decode_vote(RAW, where="x")


@pytest.mark.parametrize(
    "words",
    [
        {"version": 1},
        {"votes": MANIFEST.votes[:1]},
        {"votes": [*MANIFEST.votes, MANIFEST.votes[1]]},
        {"votes": [MANIFEST.votes[0], msgspec.structs.replace(MANIFEST.votes[1], runs=(1, 3))]},
        {"votes": [MANIFEST.votes[0], msgspec.structs.replace(MANIFEST.votes[1], runs=(0, 2))]},
        {"votes": [MANIFEST.votes[0], msgspec.structs.replace(MANIFEST.votes[1], runs=(1,))]},
        {"votes": [MANIFEST.votes[0], msgspec.structs.replace(MANIFEST.votes[1], folder=1)]},
        {"folders": ["../x"]},
        {"folders": [SET, SET]},
        {"job": "../x"},
    ],
    ids=str,
)
def test_a_manifest_with_a_good_digest_and_bad_words_is_refused(words):
    raw = man.encode_record(msgspec.structs.replace(MANIFEST, **words))
    with pytest.raises(DamagedError, match=r"^x"):
        man.decode_manifest(raw, where="x")


@pytest.mark.parametrize(
    "words",
    [
        {"version": 1},
        {"files": [msgspec.structs.replace(a_file(1), digests=b"")]},
        {"files": [msgspec.structs.replace(a_file(1), nbytes=BLOCK_NBYTES + 1)]},
        {"files": [msgspec.structs.replace(a_file(1), name="../x")]},
        {"folder": "../x"},
        {"node": "../x"},
    ],
    ids=str,
)
def test_a_vote_with_a_good_digest_and_bad_words_is_refused(words):
    raw = man.encode_record(msgspec.structs.replace(VOTES[0].vote, **words))
    with pytest.raises(DamagedError, match=r"^x"):
        man.decode_vote(raw, where="x")


def test_a_manifest_has_some_fifty_bytes_of_a_node():
    """What every rank reads of a job of ten thousand nodes."""
    nodes = 1000
    votes = [
        a_vote(f"node-{n:05d}", range(8 * n, 8 * n + 8), world_size=8 * nodes, folder=f"e00000003-{n // 8:08x}")
        for n in range(nodes)
    ]
    raw = man.encode_record(man.make_manifest(votes, save=SAVE, writer="test"))
    assert len(raw) <= 64 * nodes


@pytest.mark.parametrize("words", [{"digest_kind": "md5"}, {"key_id": "0" * 16}], ids=str)
def test_a_manifest_of_unknown_digests_is_neither_written_nor_read(words):
    other = msgspec.structs.replace(MANIFEST, **words)
    with pytest.raises(IntegrityError, match="which this program does not know"):
        man.encode_record(other)
    body = b"CKPTDMF1" + msgspec.msgpack.encode(other)
    with pytest.raises(IntegrityError, match=r"^x: has digests"):
        man.decode_manifest(body + digest(body), where="x")


@pytest.mark.parametrize("raw", [b"", b"{}", b"[]", b"\xff\xfe", b'{"format": 1}', b"null"])
def test_a_committed_that_is_none(raw):
    with pytest.raises(DamagedError, match=r"^x"):
        decode_committed(raw, where="x")


def test_a_committed_of_another_format():
    raw = encode_committed(msgspec.structs.replace(COMMITTED, format=1))
    with pytest.raises(DamagedError, match="format 1"):
        decode_committed(raw, where="x")


@pytest.mark.parametrize("changed", [{}, {"files": "other"}], ids=["fields as today", "other fields"])
def test_records_of_another_version_are_refused_and_both_are_named(changed):
    """Version 2 had `shares` in the place of `attestations`: without them no replica would have been compared."""
    for record, decode in ((VOTES[0].vote, man.decode_vote), (MANIFEST, man.decode_manifest)):
        fields = msgspec.to_builtins(record, builtin_types=[bytes]) | {"version": 2} | changed
        body = b"CKPTDMF1" + msgspec.msgpack.encode(fields)
        with pytest.raises(DamagedError, match=r"^x: version 2, this program reads 5"):
            decode(body + digest(body), where="x")
    raw = msgspec.json.encode(msgspec.to_builtins(COMMITTED) | {"format": 2, "replicas": "apart"} | changed)
    with pytest.raises(DamagedError, match=r"^x: format 2, this program reads 5"):
        decode_committed(raw, where="x")


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (VOTES[0].vote, "the vote of node n1 for step 100 .* of job 'job' has"),
        (MANIFEST, "the manifest for step 100 .* of job 'job' has"),
    ],
)
def test_no_record_is_written_that_no_reader_would_read(monkeypatch, record, words):
    nbytes = len(man.encode_record(record))
    monkeypatch.setattr(man, "MAX_RECORD_NBYTES", nbytes)
    assert len(man.encode_record(record)) == nbytes
    monkeypatch.setattr(man, "MAX_RECORD_NBYTES", nbytes - 1)
    with pytest.raises(UsageError, match=rf"{words} {nbytes} bytes, and at most {nbytes - 1}") as caught:
        man.encode_record(record)
    assert "tensors" in caught.value.hint
