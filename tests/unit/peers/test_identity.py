"""Who a daemon is: kept with its arena, never readable by others, found quickly whatever the resolver does."""

import errno
import os
import shutil
import socket
import stat
import time

import pytest

from ckptd.arena.arena import Arena
from ckptd.arena.saved_topology import Kept, keep_topology, kept_topologies
from ckptd.daemon.bulk_host import BulkHost
from ckptd.doctor.probe_peers import examine_peers
from ckptd.peers import identity as identity_module
from ckptd.peers.identity import find_host, identify, node_name
from ckptd.peers.keys import fits, make_keys, read_keys, write_keys
from ckptd.peers.plane import PeerPlane
from ckptd.shared.base.errors import ConfigError
from ckptd.shared.base.ids import JobKey
from ckptd.shared.files import spare_pages
from ckptd.shared.format import arena_paths
from ckptd.shared.protocol.topology import Peer, Topology
from ckptd.system.config import Config

JOB = JobKey("/store", "job")
PEER = Peer("n1", "arena-1", "tcp://10.0.0.1:4000", "k" * 40, "rack-1")


def config(tmp_path, **more):
    return Config(arena=str(tmp_path), **({"peer_address": "127.0.0.1"} | more))


def test_it_stays_the_same_while_the_arena_does(tmp_path):
    first = identify(config(tmp_path))
    assert fits(first.keys)
    first.keep_port(4711)
    second = identify(config(tmp_path))
    assert (second.arena, second.keys, second.kept_port) == (first.arena, first.keys, 4711)
    file = tmp_path / arena_paths.IDENTITY
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert first.keys.secret not in repr(first)
    file.unlink()
    third = identify(config(tmp_path))
    assert third.arena != first.arena
    assert third.keys != first.keys


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x83", b"x" * 100])
def test_a_damaged_file_makes_another_one(tmp_path, raw):
    first = identify(config(tmp_path))
    (tmp_path / arena_paths.IDENTITY).write_bytes(raw)
    second = identify(config(tmp_path))
    assert fits(second.keys)
    assert second.keys != first.keys
    assert identify(config(tmp_path)).keys == second.keys


def test_a_key_file_is_used_and_the_arena_keeps_its_number(tmp_path):
    path = str(tmp_path / "key.toml")
    keys = make_keys()
    write_keys(path, keys)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    own = identify(config(tmp_path))
    told = identify(config(tmp_path, key_file=path))
    assert (told.keys, told.arena) == (keys, own.arena)
    with pytest.raises(ConfigError, match="is there already"):
        write_keys(path, make_keys())
    assert read_keys(path) == keys


def test_a_key_file_that_is_none_is_refused(tmp_path):
    path = str(tmp_path / "key.toml")
    with pytest.raises(ConfigError, match="cannot read key_file"):
        read_keys(path)
    keys = make_keys()
    write_keys(path, keys)
    os.chmod(path, 0o640)
    with pytest.raises(ConfigError, match="can read") as caught:
        read_keys(path)
    assert "chmod 600" in caught.value.hint
    os.chmod(path, 0o600)
    for text in ("", "public = 3", "\xff", f'public = "{keys.public}"\nsecret = "{make_keys().secret}"\n'):
        with open(path, "w", encoding="latin-1") as file:
            file.write(text)
        with pytest.raises(ConfigError, match="key"):
            read_keys(path)
    with pytest.raises(ConfigError, match="Is a directory"):
        read_keys(str(tmp_path))


@pytest.mark.parametrize(
    ("hostname", "name"),
    [
        ("gpu-17", "gpu-17"),
        ("a.b_c", "a.b_c"),
        ("-x", "x"),
        ("höst", "h-st"),
        ("", "node"),
        ("é", "node"),
        ("a" * 300, "a" * 255),
    ],
)
def test_a_host_name_becomes_a_node_name(hostname, name):
    assert node_name(hostname) == name


def test_node_and_domain_are_settings(tmp_path):
    found = identify(config(tmp_path, node="n7", domain="rack 3"))
    assert (found.node, found.domain) == ("n7", "rack 3")
    assert identify(config(tmp_path)).node == node_name(socket.gethostname())


def test_hosts():
    assert find_host("127.0.0.1") == ("127.0.0.1", "")
    assert find_host("lo") == ("lo", "")
    assert find_host("localhost")[0] in ("127.0.0.1", "::1")
    with pytest.raises(ConfigError, match="cannot be resolved"):
        find_host("no-such-host.invalid")
    with pytest.raises(ConfigError, match="no address that others could connect to"):
        find_host("0.0.0.0")  # noqa: S104 - that is what is refused


@pytest.mark.parametrize("addresses", [[], ["127.0.1.1"]])
def test_a_name_that_is_loopback_or_nothing_is_reported(monkeypatch, addresses):
    answers = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers)
    host, problem = find_host("")
    assert host == "127.0.0.1"
    assert "set peer_address" in problem


def test_ipv4_comes_first(monkeypatch):
    answers = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", 0, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.1.2.3", 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers)
    assert find_host("") == ("10.1.2.3", "")


def test_a_resolver_that_hangs_holds_none(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(3))
    started = time.monotonic()
    assert find_host("")[0] == "127.0.0.1"
    assert time.monotonic() - started < identity_module._RESOLVE_S + 0.2


def test_topologies_are_kept_with_the_job(tmp_path):
    topology, other = Topology((PEER,), (0, 0)), Topology((PEER,), (0,))
    elsewhere = JobKey("/elsewhere", "job")
    assert kept_topologies(str(tmp_path)) == []
    keep_topology(str(tmp_path), Kept(JOB, "s", other, 1, 1))
    keep_topology(str(tmp_path), Kept(JOB, "s", topology, 2, 1))
    keep_topology(str(tmp_path), Kept(elsewhere, "s", other, 3, 1))
    found = {kept.job: kept for kept in kept_topologies(str(tmp_path))}
    assert found == {JOB: Kept(JOB, "s", topology, 2, 1), elsewhere: Kept(elsewhere, "s", other, 3, 1)}
    directory = tmp_path / arena_paths.job_dir(JOB)
    assert os.listdir(directory) == [arena_paths.TOPOLOGY]
    assert stat.S_IMODE((directory / arena_paths.TOPOLOGY).stat().st_mode) == 0o600


def test_what_is_no_topology_of_that_job_is_left_out(tmp_path):
    keep_topology(str(tmp_path), Kept(JOB, "s", Topology((PEER,), (0,)), 1, 1))
    for name in ("damaged-01234567", "moved-01234567", "linked-01234567", "empty-01234567"):
        (tmp_path / arena_paths.JOBS / name).mkdir()
    kept = tmp_path / arena_paths.job_dir(JOB) / arena_paths.TOPOLOGY
    (tmp_path / arena_paths.JOBS / "damaged-01234567" / arena_paths.TOPOLOGY).write_bytes(b"\xc1")
    (tmp_path / arena_paths.JOBS / "moved-01234567" / arena_paths.TOPOLOGY).write_bytes(kept.read_bytes())
    (tmp_path / arena_paths.JOBS / "linked-01234567" / arena_paths.TOPOLOGY).symlink_to(kept)
    (tmp_path / arena_paths.JOBS / "file").write_text("")
    assert [kept.job for kept in kept_topologies(str(tmp_path))] == [JOB]


# --- ckptd doctor


def verdicts(config):
    return {finding.name: str(finding.verdict) for finding in examine_peers(config)}


def test_doctor_looks_at_address_port_and_keys(tmp_path):
    assert verdicts(config(tmp_path)) == {"peer address": "ok", "ports": "ok", "keys": "ok"}
    path = str(tmp_path / "key.toml")
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        found = verdicts(config(tmp_path, peer_port=taken.getsockname()[1], key_file=path))
        port = taken.getsockname()[1]
    assert found == {"peer address": "ok", "peer port": "bad", "bulk port": "warn", "keys": "bad"}
    write_keys(path, make_keys())
    found = verdicts(config(tmp_path, peer_port=port, key_file=path))
    assert found == {"peer address": "ok", "peer port": "ok", "bulk port": "warn", "keys": "ok"}
    assert verdicts(config(tmp_path, peer_port=port, bulk_port=port))["bulk port"] == "bad"
    assert verdicts(config(tmp_path, bulk_port=port)) == {"peer address": "ok", "bulk port": "ok", "keys": "ok"}
    assert verdicts(config(tmp_path, peer_address="no-such-host.invalid"))["peer address"] == "bad"


def test_doctor_warns_of_a_name_that_is_loopback(monkeypatch, tmp_path):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [])
    finding = examine_peers(config(tmp_path, peer_address=""))[0]
    assert (str(finding.verdict), "set peer_address" in finding.fix) == ("warn", True)


def test_the_bulk_port_can_be_chosen(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        plane = PeerPlane(identify(config(tmp_path)), timeout_s=3)
        try:
            with pytest.raises(ConfigError, match=f"port {port}") as caught:
                BulkHost(Arena(str(tmp_path)), plane, port).open()
            assert "bulk_port" in caught.value.hint
            taken.close()
            bulk = BulkHost(Arena(str(tmp_path)), plane, port)
            bulk.open()
            assert plane._offers.port == port
            bulk.close()
        finally:
            plane.close()


def test_a_key_file_may_lie_anywhere(tmp_path):
    path = str(tmp_path / 'schlüssel\n"x".toml')
    keys = make_keys()
    write_keys(path, keys)
    assert read_keys(path) == keys


# --- memory that is full


@pytest.fixture
def full(tmp_path, monkeypatch):
    """The arena of a daemon where everything but the ballast is taken."""
    arena = Arena(str(tmp_path / "arena"))
    monkeypatch.setattr("ckptd.arena.arena.make_directory", lambda path: os.makedirs(path, mode=0o700))
    arena.open()
    real = os.replace

    def replace(source, target):
        if os.stat(os.path.join(arena.path, arena_paths.BALLAST)).st_size >= spare_pages.NBYTES:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    yield arena
    arena.close(remove=True)


def test_topology_and_identity_have_room_where_all_memory_is_taken(full):
    config = Config(arena=full.path, node="n1", peer_address="127.0.0.1")
    identify(config).keep_port(4321)
    assert os.stat(os.path.join(full.path, arena_paths.BALLAST)).st_blocks * 512 >= 1 << 20  # and again for the next
    assert identify(config).kept_port == 4321
    keep_topology(full.path, Kept(JobKey("/store", "job"), "s", Topology((PEER,), (0,)), 1, 1))
    assert [kept.job for kept in kept_topologies(full.path)] == [JobKey("/store", "job")]
    shutil.rmtree(os.path.join(full.path, arena_paths.JOBS))


def test_a_port_that_cannot_be_kept_stops_none(tmp_path, monkeypatch, caplog):
    me = identify(Config(arena=str(tmp_path), node="n1", peer_address="127.0.0.1"))

    def replace(_source, _target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)
    me.keep_port(4321)
    assert "port could not be kept port=4321" in caplog.text
