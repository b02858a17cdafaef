"""Keys and keyed digests by themselves: files of keys, purposes, and what says which key it is proved with."""

import json
import os
import pathlib
import stat
import subprocess
import sys
import tempfile

import msgspec
import pytest
import torch

from ckptd.checkpoint.export.source import load
from ckptd.checkpoint.repair.checkpoint import open_checkpoint
from ckptd.checkpoint.verify import verify_path
from ckptd.cli import invoke
from ckptd.daemon.adoption import open_arena
from ckptd.shared.base.errors import ConfigError, DamagedError, IntegrityError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.files.integrity_key import chosen, integrity_of, read_key, write_key
from ckptd.shared.format.committed import EVERYTHING, identify, open_sound
from ckptd.shared.format.committed_record import decode_committed, encode_committed, make_committed
from ckptd.shared.format.digest import BLOCK_NBYTES, KIND
from ckptd.shared.format.integrity import KEYED_KIND, XXH3, Keyed, Purpose
from ckptd.shared.format.manifest import (
    STOCK_METADATA,
    Vote,
    decode_manifest,
    decode_vote,
    encode_record,
    make_manifest,
    vote_file,
)
from ckptd.shared.format.sealed_record import VERSION
from ckptd.shared.format.slot import PAGE, SEALS_NBYTES, Seal, SlotState, decode_seals, encode_seal, next_seal
from ckptd.shared.protocol.publication import Publication
from ckptd.shared.stores.kinds import open_files
from ckptd.store.posix.commit import commit
from ckptd.store.posix.publish import publish_to
from ckptd.store.posix.scan import Place, committed_at, files_at, scan
from ckptd.store.votes import check_files
from ckptd.system.config import Config
from ckptd.system.files import FileLayer
from ckptd_client._load.checkpoint import open_directory
from ckptd_client._load.foreign.load_from import load_from
from ckptd_client._load.rounds import read_checkpoint
from ckptd_client._local.rank import Group
from ckptd_client.dcp import CkptdReader
from tests import checkpoints, collide
from tests.runs import OTHER_RUN, OTHER_STORE_ID, RUN, SET, STORE_ID
from tests.slots import write_slot
from tests.stored import voted

ONE, OTHER = Keyed(bytes(range(32))), Keyed(bytes(32))
SAVE = SaveId(1, 2, 30, RUN)
PLACE = JobKey("/store", "job")


def a_vote(integrity, **changes):
    vote = Vote(
        version=VERSION, digest_kind=integrity.kind, store_id=STORE_ID, job="job", save=SAVE, node="n", folder=SET,
        world_size=1, files=[], key_id=integrity.key_id,
    )  # fmt: skip
    return msgspec.structs.replace(vote, **changes)


def test_xxh3_is_forged_in_milliseconds_and_blake3_is_not():
    data = os.urandom(1 << 20)
    forged = collide.forge(data, 4096, b"any 768 bytes")
    assert XXH3.digest(forged) == XXH3.digest(data)
    assert ONE.digest(forged) != ONE.digest(data)


def test_every_key_purpose_and_byte_has_a_digest_of_its_own():
    digests = {key.digest(b"data", purpose) for key in (ONE, OTHER) for purpose in Purpose}
    digests |= {ONE.digest(b"datb"), XXH3.digest(b"data")}
    assert len(digests) == 2 * len(Purpose) + 2
    assert {len(found) for found in digests} == {16}


def test_what_comes_in_parts_has_the_same_digest():
    data = os.urandom(BLOCK_NBYTES // 4 + 17)
    for integrity in (ONE, XXH3):
        for purpose in (Purpose.BLOCK, Purpose.TABLE):
            running = integrity.hasher(purpose)
            for at in range(0, len(data), 100_001):
                running.update(memoryview(data)[at : at + 100_001])
            assert running.value() == integrity.digest(data, purpose)


def test_the_key_is_in_no_repr():
    assert ONE.key.hex() not in repr(ONE)
    assert ONE.key_id in repr(ONE)


# --- seals


def pages_of(seal, integrity):
    return encode_seal(seal, 7, integrity) + bytes(PAGE)


SEALED = Seal(state=SlotState.SEALED, job=PLACE, save=SAVE, image_nbytes=9)


@pytest.mark.parametrize(
    ("writer", "reader", "said"),
    [
        (XXH3, ONE, "is not keyed"),
        (ONE, XXH3, f"is keyed .key id {ONE.key_id}., and no key was given"),
        (OTHER, ONE, f"is keyed with another key .key id {OTHER.key_id}, not {ONE.key_id}."),
    ],
)
def test_a_seal_of_another_key_is_refused_and_not_taken_for_a_free_slot(writer, reader, said):
    with pytest.raises(IntegrityError, match=said) as caught:
        decode_seals(pages_of(SEALED, writer), reader, where="slot s")
    assert caught.value.message.startswith("slot s: ")
    assert caught.value.hint


def test_a_free_slot_is_free_for_whatever_key():
    for writer, reader in ((XXH3, ONE), (ONE, XXH3), (OTHER, ONE)):
        pages = pages_of(Seal(), writer)
        assert decode_seals(pages, reader)[2] == Seal()
        offset, page = next_seal(pages, SEALED, reader)
        both = bytearray(pages)
        both[offset : offset + len(page)] = page
        assert decode_seals(bytes(both), reader)[2].save == SAVE


def test_a_torn_page_is_torn_and_the_other_in_force():
    page = encode_seal(SEALED, 7, ONE)
    torn = bytearray(encode_seal(msgspec.structs.replace(SEALED, image_nbytes=10), 8, ONE))
    torn[50] ^= 1
    assert decode_seals(page + bytes(torn), ONE)[2].image_nbytes == 9
    assert decode_seals(bytes(torn) + bytes(PAGE), ONE) == (1, 0, Seal())


def test_a_seal_that_claims_the_key_without_it_counts_for_nothing():
    """The page of an unkeyed writer that has put the key's id into it."""
    page = bytearray(encode_seal(SEALED, 7, ONE))
    page[-16:] = XXH3.digest(bytes(page[:-16]))
    assert decode_seals(bytes(page) + bytes(PAGE), ONE) == (1, 0, Seal())


# --- records


def test_a_vote_is_no_manifest():
    raw = encode_record(a_vote(ONE), ONE)
    assert decode_vote(raw, where="v", integrity=ONE) == a_vote(ONE)
    with pytest.raises(DamagedError, match="digest does not match"):
        decode_manifest(raw, where="v", integrity=ONE)


@pytest.mark.parametrize(
    ("writer", "reader", "said"),
    [(XXH3, ONE, "is not keyed"), (ONE, XXH3, "no key was given"), (OTHER, ONE, "with another key")],
)
def test_records_of_another_key_say_so(writer, reader, said):
    raw = encode_record(a_vote(writer), writer)
    with pytest.raises(IntegrityError, match=said):
        decode_vote(raw, where="v", integrity=reader)
    manifest = make_manifest([voted(a_manifests_vote(writer), writer)], save=SAVE, writer="w", integrity=writer)
    raw = encode_record(manifest, writer)
    with pytest.raises(IntegrityError, match=said):
        decode_manifest(raw, where="m", integrity=reader)
    committed = encode_committed(make_committed(manifest, raw, writer))
    with pytest.raises(IntegrityError, match=said):
        decode_committed(committed, where="c", integrity=reader)
    assert decode_committed(committed, where="c", integrity=writer).manifest_digest


def a_manifests_vote(integrity, tmp="/dev/shm"):
    path = os.path.join(tmp, f"ckptd-test-{os.getpid()}.slot")
    try:
        record = write_slot(path, PLACE, SAVE).record
    finally:
        os.unlink(path)
    return a_vote(integrity, files=[record])


def test_a_record_cannot_be_brought_down_to_xxh3():
    """As an attacker would: the fields of an unkeyed one, with its digest made right."""
    raw = encode_record(a_vote(XXH3), XXH3)
    with pytest.raises(IntegrityError, match="is not keyed"):
        decode_vote(raw, where="v", integrity=ONE)
    lying = a_vote(XXH3, digest_kind=KEYED_KIND, key_id=ONE.key_id)
    body = b"CKPTDMF1" + msgspec.msgpack.encode(lying)
    with pytest.raises(DamagedError, match="digest does not match"):
        decode_vote(body + XXH3.digest(body), where="v", integrity=ONE)
    with pytest.raises(IntegrityError, match="vote"):
        encode_record(lying, XXH3)


@pytest.mark.parametrize(
    "lie", [{"step": 31}, {"run": OTHER_RUN.hex()}, {"store_id": OTHER_STORE_ID}, {"job": "other"}]
)
def test_committed_is_proved_by_itself(lie):
    manifest = make_manifest([voted(a_manifests_vote(ONE), ONE)], save=SAVE, writer="w", integrity=ONE)
    committed = make_committed(manifest, encode_record(manifest, ONE), ONE)
    assert (committed.digest_kind, committed.key_id) == (KEYED_KIND, ONE.key_id)
    forged = msgspec.structs.replace(committed, **lie)
    with pytest.raises(DamagedError, match="proof does not match"):
        decode_committed(encode_committed(forged), where="c", integrity=ONE)
    bare = msgspec.structs.replace(forged, proof="", digest_kind=KIND, key_id="")
    with pytest.raises(IntegrityError, match="is not keyed"):
        decode_committed(encode_committed(bare), where="c", integrity=ONE)


# --- keys in files


def test_a_key_file_is_for_its_owner_alone_and_never_replaced(tmp_path):
    path = str(tmp_path / "key")
    made = write_key(path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert read_key(path).key_id == made.key_id
    with pytest.raises(ConfigError, match="there already"):
        write_key(path)
    for mode in (0o640, 0o604, 0o660):
        os.chmod(path, mode)
        with pytest.raises(ConfigError, match="nobody else can read"):
            read_key(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file away")
def test_a_key_of_another_user_is_refused(tmp_path):
    path = str(tmp_path / "key")
    write_key(path)
    os.chown(path, 12345, -1)
    with pytest.raises(ConfigError, match="of uid 0 that nobody else can read"):
        read_key(path)


@pytest.mark.parametrize(
    "text", ["", "integrity_key = 3", 'integrity_key = "abc"', 'integrity_key = "00"', "\xff", "["]
)
def test_files_that_hold_no_key(tmp_path, text):
    path = tmp_path / "key"
    path.write_bytes(text.encode("latin-1"))
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="holds no integrity key"):
        read_key(str(path))


def test_what_settings_make_of_a_key(tmp_path):
    path = str(tmp_path / "key")
    made = write_key(path)
    assert integrity_of(None, None) is integrity_of("auto", None) is integrity_of("xxh3", path) is XXH3
    assert {integrity_of(kind, path).key_id for kind in (None, "auto", "keyed")} == {made.key_id}
    with pytest.raises(ConfigError, match="needs a key"):
        integrity_of("keyed", None)
    with pytest.raises(ConfigError, match="integrity='md5'"):
        integrity_of("md5", path)
    here = {"CKPTD_INTEGRITY_KEY_FILE": path}
    assert chosen(None, None, here).key_id == chosen("keyed", None, here).key_id == made.key_id
    assert chosen("xxh3", None, here) is chosen(None, None, here | {"CKPTD_INTEGRITY": "xxh3"}) is XXH3
    assert chosen(None, path, {"CKPTD_INTEGRITY": "xxh3"}).key_id == made.key_id


def test_keygen_makes_one(tmp_path, capsys):
    path = str(tmp_path / "key")
    assert invoke(["keygen", "--integrity", path]) == 0
    said = capsys.readouterr().out
    assert read_key(path).key_id in said
    assert read_key(path).key.hex() not in said


@pytest.mark.process
def test_blake3_is_imported_only_for_a_key():
    code = """
import sys
sys.modules["blake3"] = None
from ckptd.shared.format.integrity import XXH3, Keyed
from ckptd.shared.base.errors import ConfigError
assert XXH3.digest(b"x")
try:
    Keyed(bytes(32))
except ConfigError as error:
    sys.exit("ckptd[keyed]" not in error.hint)
sys.exit(2)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- an arena of another key


@pytest.fixture
def shm():
    with tempfile.TemporaryDirectory(prefix="ckptd-test-", dir="/dev/shm") as directory:
        yield directory


def test_a_daemon_with_another_key_leaves_what_is_staged_alone(tmp_path, shm):
    key = str(tmp_path / "key")
    write_key(key)
    config = Config(arena=shm, integrity_key_file=key)
    arena = open_arena(config)
    name = arena.allocate(PLACE, 0, 4 * PAGE)
    arena.seal(PLACE, name, SEALED)
    arena.close(remove=False)
    path = arena.slot_path(PLACE, name)
    before = pathlib.Path(path).read_bytes()
    for other in (msgspec.structs.replace(config, integrity="xxh3"), Config(arena=config.arena)):
        with pytest.raises(ConfigError, match="is keyed") as caught:
            open_arena(other)
        assert path in caught.value.message
        assert "start the daemon with the settings it had: " in caught.value.hint
        assert "integrity_key_file" in caught.value.hint
    assert pathlib.Path(path).read_bytes() == before
    again = open_arena(config)
    assert decode_seals(before[-SEALS_NBYTES:], again.integrity)[2].save == SAVE
    again.close(remove=False)


def test_a_daemon_of_another_version_leaves_what_is_staged_alone(shm):
    arena = open_arena(Config(arena=shm))
    name = arena.allocate(PLACE, 0, 4 * PAGE)
    arena.close(remove=False)
    path = pathlib.Path(arena.slot_path(PLACE, name))
    head = encode_seal(SEALED, 7)[:-16].replace(b"CKPTDSL4", b"CKPTDSL3")
    before = bytes(2 * PAGE) + head + XXH3.digest(head) + bytes(PAGE)
    path.write_bytes(before)
    with pytest.raises(ConfigError, match=f"{path}: its seal is of version 3, this program reads 4") as caught:
        open_arena(Config(arena=shm))
    assert caught.value.hint == (
        f"drain it with the ckptd that wrote it: ckptd drain --wait; or, to give up what is staged: rm -r {shm}"
    )
    assert path.read_bytes() == before


def test_a_reader_without_a_key_says_what_to_type(tmp_path):
    """Not that the checkpoint is damaged."""
    final = tmp_path / "job" / SAVE.dirname
    final.mkdir(parents=True)
    vote = a_manifests_vote(ONE)
    place, raw = vote_file(vote, ONE)
    (final / place).parent.mkdir(parents=True)
    (final / place).write_bytes(raw)
    manifest = make_manifest([voted(vote, ONE)], save=SAVE, writer="w", integrity=ONE)
    raw = encode_record(manifest, ONE)
    committed = make_committed(manifest, raw, ONE)
    (final / committed.manifest).write_bytes(raw)
    (final / "COMMITTED").write_bytes(encode_committed(committed))
    with pytest.raises(IntegrityError, match="no key was given") as caught:
        open_checkpoint(str(final))
    assert "--key FILE" in caught.value.hint
    assert open_checkpoint(str(final), ONE).manifest == manifest
    assert FileLayer().integrity is XXH3


# --- every reader


def reads(path, integrity):
    """One call for each way to open a checkpoint; all of them say how it must be proved."""
    place = Place(JobKey(*os.path.split(os.path.dirname(path))), checkpoints.SAVE)
    layer = FileLayer(place.key.store, integrity)
    to = Publication(os.path.join(place.key.store, "published"), whole=True)
    chosen_by = {"integrity": "xxh3"} if integrity is XXH3 else {"integrity_key_file": written(integrity, path)}
    return {
        "identify": lambda: identify(files_at(layer, path)),
        "open_sound": lambda: open_sound(open_files(path, integrity), EVERYTHING),
        "committed_at": lambda: committed_at(layer, place),
        "commit": lambda: commit(layer, place.key, place.save, "test"),
        "publish": lambda: publish_to(layer, place.key, os.path.basename(path), to),
        "rebuild": lambda: open_checkpoint(path, integrity),
        "export": lambda: load(path, integrity),
        "load": lambda: read_checkpoint(path, a_state(), group=Group(0, 1, "test"), integrity=integrity),
        "load_from": lambda: load_from(path, a_state(), Group(0, 1, "test"), integrity=integrity),
        "open_directory": lambda: open_directory(path, integrity=integrity),
        "CkptdReader": lambda: CkptdReader(path, **chosen_by).read_metadata(),
    }


def written(key, path):
    file = f"{path}.key-{key.key_id}"
    if not os.path.exists(file):
        write_key(file)
        text = pathlib.Path(file).read_text()
        pathlib.Path(file).write_text(text.replace(read_key(file).key.hex(), key.key.hex()))
    assert read_key(file).key_id == key.key_id
    return file


def a_state():
    return {"w": torch.arange(100.0)}


@pytest.mark.parametrize(
    ("writer", "reader", "said"),
    [(XXH3, ONE, "is not keyed"), (ONE, XXH3, "no key was given"), (OTHER, ONE, "with another key")],
)
def test_every_reader_refuses_what_is_proved_in_another_way(tmp_path, writer, reader, said):
    path = str(checkpoints.write_checkpoint(tmp_path / "store", [a_state()], integrity=writer))
    for name, read in reads(path, reader).items():
        with pytest.raises(IntegrityError, match=said) as caught:
            read()
        assert path in caught.value.message, name
        assert "integrity" in caught.value.hint, name
    problems = scan(FileLayer(integrity=reader), JobKey(str(tmp_path / "store"), "demo")).problems
    assert len(problems) == 1
    assert said in problems[0]
    found = [str(problem) for problem in verify_path(path, integrity=reader).problems]
    (one,) = found  # and nothing false of files that cannot be known
    assert "COMMITTED" in one
    assert said in one
    assert "--key" in one or "--integrity xxh3" in one
    for name, read in reads(path, writer).items():
        if name != "publish":  # it has no trainer's files
            read()


def test_another_store_than_the_manifests_is_no_checkpoint(tmp_path):
    """Of two true records: COMMITTED of one store beside the manifest of another."""
    path = checkpoints.write_checkpoint(tmp_path / "store", [a_state()])
    record = json.loads((path / "COMMITTED").read_bytes())
    (path / "COMMITTED").write_text(json.dumps(record | {"store_id": OTHER_STORE_ID}))
    with pytest.raises(DamagedError, match="store id"):
        open_sound(open_files(str(path), XXH3), EVERYTHING)


def test_what_lies_there_for_stock_readers_is_not_proved_for_another_user(tmp_path, monkeypatch):
    """Who writes to the store puts metadata there before the commit; with a key none but its holder's is pinned."""
    evil = b"metadata of somebody else"

    def planted(unfinished, *args):
        pathlib.Path(unfinished.location, STOCK_METADATA).write_bytes(evil)
        return check_files(unfinished, *args)

    monkeypatch.setattr("ckptd.store.posix.commit.check_files", planted)
    path = checkpoints.write_checkpoint(tmp_path / "store", [a_state()], integrity=ONE)
    assert (path / STOCK_METADATA).read_bytes() != evil
    assert verify_path(str(path), integrity=ONE).ok


@pytest.mark.parametrize("reader", [XXH3, ONE])
def test_a_kind_of_any_length_is_reported_short(reader):
    """A forged record's word is said in the error; not megabytes of it."""
    body = b"CKPTDMF1" + msgspec.msgpack.encode(a_vote(XXH3, digest_kind="x" * (8 << 20)))
    committed = make_committed(make_manifest([voted(a_manifests_vote(XXH3))], save=SAVE, writer="w"), b"")
    long = encode_committed(msgspec.structs.replace(committed, digest_kind="x" * 60_000))
    for decode, raw in ((decode_vote, body + XXH3.digest(body)), (decode_committed, long)):
        with pytest.raises(DamagedError) as caught:
            decode(raw, where="v", integrity=reader)
        assert len(str(caught.value)) < 1000
