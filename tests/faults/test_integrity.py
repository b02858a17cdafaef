"""A checkpoint on the store, forged: who may write there puts other bytes into an image. With a key nobody takes them.

Three ways to forge: bytes with the same XXH3, so that no record need be touched; bytes with all digests, manifest and
COMMITTED made right for who checks with XXH3; and the same with the fields that say that it is keyed.
"""

import json
import os
import shutil
import sys

import msgspec
import pytest

from ckptd.cli import invoke
from ckptd.shared.files.integrity_key import read_key, write_key
from ckptd.shared.format.committed import identify
from ckptd.shared.format.committed_record import encode_committed, make_committed
from ckptd.shared.format.digest import KIND, blocks, digest
from ckptd.shared.format.integrity import XXH3, Integrity
from ckptd.shared.format.manifest import COMMITTED, decode_manifest, decode_vote, encode_record
from ckptd.shared.format.slot import PAGE
from ckptd.shared.stores.kinds import open_files
from tests import collide
from tests.cluster import Node, wait_for
from tests.runs import manifest_in

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]

SAVES = """
import sys, torch, ckptd_client
with ckptd_client.connect(job="j", start=False) as client:
    client.save({"w": torch.arange(500_000, dtype=torch.float32), "lr": 0.5}, 10, drain=True).wait("durable", 60)
"""
READS = """
import json, sys, torch, ckptd_client, torch.distributed.checkpoint as dcp
from ckptd_client.dcp import CkptdReader
path, options = sys.argv[1], json.loads(sys.argv[2])
real = torch.arange(500_000, dtype=torch.float32)
def told(read):
    state = {"w": torch.zeros(500_000), "lr": 0.0}
    try:
        read(state)
    except BaseException as error:  # DCP has its own
        text = str(getattr(error, "failures", error))
        return f"{type(error).__name__}: {text}"
    untouched = not state["w"].any()
    return "as saved" if torch.equal(state["w"], real) else "nothing" if untouched else "forged"
found = {}
found["reader"] = told(lambda state: dcp.load(state, storage_reader=CkptdReader(path, **options), no_dist=True))
with ckptd_client.connect(job="other", start=False) as client:
    found["load_from"] = told(lambda state: client.load_from(path, state, **options))
with ckptd_client.connect(job="j", start=False) as client:
    found["load"] = told(client.load)
print(json.dumps(found))
"""
READERS = {"reader", "load_from", "load"}


class World:
    """A store with a checkpoint, and nodes that are new."""

    def __init__(self, directory, key):
        self.directory, self.key = directory, key
        self.environ = {"CKPTD_INTEGRITY_KEY_FILE": key} if key else {}

    @property
    def final(self):
        (found,) = [one for one in (self.directory / "j").iterdir() if one.name[0] not in ".l"]
        return found

    def save(self):
        self.directory.mkdir()
        with self.node() as node:
            rank = node.run(SAVES, **self.environ)
            assert rank.wait(60) == 0, rank.stderr.read().decode()
        (self.directory / "j" / "latest").unlink()

    def node(self):
        node = Node(str(self.directory))
        node.start(**self.environ)
        return node

    def verbs(self, *flags):
        """Exit codes of those that read all bytes."""
        out = str(self.directory / "exported")
        codes = {
            "verify": invoke(["verify", *flags, str(self.final)]),
            "export": invoke(["export", *flags, "--only", "w", str(self.final), out]),
        }
        shutil.rmtree(out, ignore_errors=True)
        return codes

    def reads(self, **options):
        """What comes of a load, of load_from, and of DCP with our reader, in another life of the job, elsewhere."""
        with self.node() as node:
            said = node.complete(
                sys.executable, "-c", READS, str(self.final), json.dumps(options), timeout_s=90, **self.environ
            )
        return json.loads(said.splitlines()[-1])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The store of each kind, saved once."""
    made = {}

    def get(kind):
        if kind not in made:
            base = tmp_path_factory.mktemp(kind)
            key = str(base / "key") if kind == "keyed" else ""
            if key:
                write_key(key)
            made[kind] = World(base / "store", key)
            made[kind].save()
        return made[kind]

    return get


@pytest.fixture(params=["xxh3", "keyed"])
def world(request, saved, tmp_path):
    """A copy."""
    found = saved(request.param)
    shutil.copytree(found.directory, tmp_path / "store", symlinks=True)
    return World(tmp_path / "store", found.key)


def collide_in(world):
    """No record is touched."""
    path = world.final / "r00000-p00.safetensors"
    data = path.read_bytes()
    path.write_bytes(collide.forge(data, 64 * PAGE, b"\x42" * 768))


class Claims(Integrity):
    """XXH3 that says it is the key's."""

    def __init__(self, true):
        self.kind, self.key_id = true.kind, true.key_id


def rewrite(world, integrity):
    """Another byte in the image, and everything above it made anew: votes, manifest, COMMITTED."""
    true = read_key(world.key) if world.key else XXH3
    path = world.final / "r00000-p00.safetensors"
    data = bytearray(path.read_bytes())
    data[64 * PAGE] ^= 0x40
    path.write_bytes(data)
    table = b"".join(digest(bytes(data[start:stop])) for start, stop in blocks(len(data)))
    said = {"digest_kind": integrity.kind, "key_id": integrity.key_id}

    def forged(record, **changes):
        return msgspec.structs.replace(record, **said, **changes)

    manifest = decode_manifest(manifest_in(world.final).read_bytes(), where="m", integrity=true)
    votes = []
    for ref in manifest.votes:
        where = world.final / manifest.place_of(ref)
        vote = decode_vote(where.read_bytes(), where="v", integrity=true)
        files = [msgspec.structs.replace(vote.files[0], digests=table)]
        raw = encode_record(forged(vote, files=files), integrity)
        votes.append(msgspec.structs.replace(ref, nbytes=len(raw), digest=integrity.digest(raw)))
        where.unlink()
        (world.final / manifest.place_of(votes[-1])).write_bytes(raw)
    stock = [msgspec.structs.replace(s, digest=digest((world.final / s.name).read_bytes())) for s in manifest.stock]
    manifest = forged(manifest, votes=votes, stock=stock)
    raw = encode_record(manifest, integrity)
    committed = make_committed(manifest, raw, integrity)
    manifest_in(world.final).unlink()
    (world.final / committed.manifest).write_bytes(raw)
    (world.final / COMMITTED).write_bytes(encode_committed(committed))


def bring_down(world):
    """To XXH3, whatever it was."""
    rewrite(world, XXH3)
    assert identify(open_files(str(world.final), XXH3)).digest_kind == KIND


def claim(world):
    """With the key's id, but without the key."""
    rewrite(world, Claims(read_key(world.key)) if world.key else XXH3)


@pytest.mark.parametrize("forge", [collide_in, bring_down, claim])
def test_a_forged_checkpoint(world, forge, capsys):
    assert set(world.verbs().values()) == {0} if not world.key else True
    flags = ["--key", world.key] if world.key else []
    assert world.verbs(*flags) == {"verify": 0, "export": 0}
    forge(world)
    capsys.readouterr()
    codes, said = world.verbs(*flags), capsys.readouterr()
    found = world.reads()
    if not world.key:  # digests are no proof against a person: docs/security.md
        assert codes == {"verify": 0, "export": 0}, said
        assert found == dict.fromkeys(READERS, "forged")
        return
    assert codes == {"verify": 1, "export": 1}
    assert {name for name, text in found.items() if "Error" in text or "Exception" in text} == READERS, found
    if forge is bring_down:
        assert "is not keyed" in said.out + said.err
        for name in READERS:
            assert "is not keyed" in found[name], found[name]
        assert "integrity='xxh3'" in found["load_from"]
        assert world.verbs("--integrity", "xxh3") == {"verify": 0, "export": 0}, "who asks for no proof gets none"


@pytest.mark.parametrize("world", ["keyed"], indirect=True)
def test_readers_and_verbs_with_and_without_the_key(world, capsys, tmp_path):
    flags = ["--key", world.key]
    assert world.verbs(*flags) == {"verify": 0, "export": 0}
    assert world.reads() == dict.fromkeys(READERS, "as saved")
    other = str(tmp_path / "other")
    write_key(other)
    capsys.readouterr()
    for verb in (["verify"], ["export", "--only", "w"], ["rebuild"], ["list"]):
        target = [str(world.final), str(tmp_path / "out")] if verb[0] == "export" else [str(world.final)]
        target = [str(world.final.parent)] if verb[0] == "list" else target
        for how, text in (([], "no key was given"), (["--key", other], "with another key")):
            assert invoke([*verb, *how, *target]) == 1, verb
            said = capsys.readouterr()
            assert text in " ".join((said.out + said.err).split()), said
        assert invoke([*verb, *flags, *target]) == 0, capsys.readouterr()
    environ = world.environ
    world.environ = {}
    found = world.reads()
    assert all("no key was given" in found[name] for name in READERS), found
    assert "integrity_key_file" in found["reader"]
    world.environ = environ


@pytest.mark.parametrize("world", ["keyed"], indirect=True)
def test_a_checkpoint_without_its_records_is_no_other_programs(world):
    """Who takes COMMITTED and the manifest away leaves what DCP reads, which proves nothing."""
    for path in (world.final / COMMITTED, manifest_in(world.final)):
        path.unlink()
    world.final.rename(world.final.with_name("model"))
    found = world.reads()
    assert "proves nothing" in found["load_from"], found
    assert "is a directory of DCP's, not ckptd's" in found["reader"], found
    assert found["load"] == "nothing"
    found = world.reads(integrity="xxh3")
    assert found["load_from"] == "as saved"


@pytest.mark.parametrize("world", ["xxh3"], indirect=True)
def test_a_keyed_job_passes_unkeyed_checkpoints_over(world, tmp_path, capsys):
    """Of the time before there was a key."""
    key = str(tmp_path / "key")
    write_key(key)
    world.environ = {"CKPTD_INTEGRITY_KEY_FILE": key}
    found = world.reads()
    assert "is not keyed" in found["load"], found
    assert "is not keyed" in found["load_from"], found
    assert "is not keyed" in found["reader"], found
    found = world.reads(integrity="xxh3")
    assert (found["load_from"], found["reader"]) == ("as saved", "as saved")
    assert invoke(["list", "--key", key, str(world.final.parent)]) == 1
    assert "is not keyed" in capsys.readouterr().out


def test_daemon_and_client_with_other_settings_find_out_at_connect(tmp_path):
    key = str(tmp_path / "key")
    write_key(key)
    code = 'import ckptd_client\nckptd_client.connect(job="j", start=False)\n'
    with Node(str(tmp_path)) as node:
        node.start(CKPTD_INTEGRITY_KEY_FILE=key)
        rank = node.run(code)
        assert rank.wait(30) == 1
        said = rank.stderr.read().decode()
        assert f"integrity keyed:{read_key(key).key_id}, this client xxh3" in said
        assert "CKPTD_INTEGRITY_KEY_FILE" in said
        for environ in (
            {"CKPTD_INTEGRITY_KEY_FILE": key},
            {"CKPTD_INTEGRITY_KEY_FILE": key, "CKPTD_INTEGRITY": "keyed"},
        ):
            assert node.run(code, **environ).wait(30) == 0


def test_a_daemon_that_connect_starts_has_the_key_that_connect_was_given(tmp_path):
    key = str(tmp_path / "key")
    write_key(key)
    code = f"""
import torch, ckptd_client
with ckptd_client.connect(job="j", integrity_key_file={key!r}) as client:
    client.save({{"w": torch.ones(5)}}, 1, drain=True).wait("durable", 60)
"""
    with Node(str(tmp_path)) as node:
        rank = node.run(code)
        assert rank.wait(60) == 0, rank.stderr.read().decode()
        (final,) = (tmp_path / "j").glob("step-*")
        assert identify(open_files(str(final), read_key(key))).step == 1
        wait_for(lambda: not os.path.exists(os.path.join(node.arena, "ckptd.sock")))


def test_a_key_is_on_no_command_line_and_in_no_log(tmp_path):
    key = str(tmp_path / "key")
    write_key(key)
    (tmp_path / "store").mkdir()
    secret = read_key(key).key
    with Node(str(tmp_path / "store")) as node:
        node.start(CKPTD_INTEGRITY_KEY_FILE=key, CKPTD_LOG_LEVEL="debug")
        stays = SAVES + '    print("durable", flush=True)\n    sys.stdin.read()\n'
        rank = node.run(stays, CKPTD_INTEGRITY_KEY_FILE=key)
        assert rank.stdout.readline() == b"durable\n", rank.stderr.read().decode()
        lines = []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    lines.append(file.read())
            except OSError:
                continue
        assert any(b"ckptd.store.worker" in line for line in lines)
        assert not any(secret in line or secret.hex().encode() in line for line in lines)
        log = node.log_text()
    assert secret.hex() not in log
    assert repr(secret)[2:-1] not in log


@pytest.mark.parametrize("world", ["keyed"], indirect=True)
def test_verbs_take_the_key_from_where_the_daemon_has_it(world, monkeypatch, tmp_path, capsys):
    """The file of settings, variables, flags: the last one wins."""
    toml = tmp_path / "config.toml"
    toml.write_text(f'integrity_key_file = "{world.key}"\nno_setting_at_all = 3\n')
    monkeypatch.setenv("CKPTD_CONFIG", str(toml))
    assert world.verbs() == {"verify": 0, "export": 0}
    monkeypatch.setenv("CKPTD_INTEGRITY", "xxh3")
    assert world.verbs() == {"verify": 1, "export": 1}
    assert "no key was given" in capsys.readouterr().out
    assert world.verbs("--key", world.key) == {"verify": 0, "export": 0}
