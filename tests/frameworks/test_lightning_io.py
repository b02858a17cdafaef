"""Lightning's CheckpointIO by itself: what is asked of it in odd orders, and what lies at its paths meanwhile."""

import gc
import os
import tempfile
import weakref

import pytest
import torch

from ckptd.shared.protocol.messages import End
from ckptd_client import ConfigError, ConnectError, UsageError
from tests.cluster import Node, wait_for

pytestmark = [pytest.mark.frameworks("lightning"), pytest.mark.timeout(120)]

STEP = 10


@pytest.fixture
def node(tmp_path):
    with Node(str(tmp_path / "store")) as node:
        os.mkdir(node.store)
        node.start("--drain-bandwidth", "2M")
        yield node


@pytest.fixture
def make(node, monkeypatch):
    """A CheckpointIO of this node; what is open is torn down."""
    from ckptd_client.integrations.lightning import CkptdCheckpointIO  # noqa: PLC0415 - torch and lightning

    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    made = []

    def io(**settings):
        settings |= {"job": "io", "store": node.store, "arena": node.arena, "start": False}
        made.append(CkptdCheckpointIO(**settings))
        return made[-1]

    yield io
    for each in made:
        each.teardown()


def checkpoint(value: float, step: int = STEP, count: int = 1_000_000):
    return {"state_dict": {"w": torch.full((count,), value)}, "global_step": step}


def value_of(path) -> float:
    return float(torch.load(path, weights_only=True)["state_dict"]["w"].mean())


def test_what_is_wrong_is_reported_before_the_training(node):
    from ckptd_client.integrations.lightning import CkptdCheckpointIO  # noqa: PLC0415

    nobody = tempfile.TemporaryDirectory(prefix="ckptd-test-", dir="/dev/shm")
    with nobody as arena, pytest.raises(ConnectError, match="no daemon"):
        CkptdCheckpointIO(job="io", store=node.store, arena=arena, start=False, connect_timeout_s=1)
    with pytest.raises(ConfigError, match="no name"):
        CkptdCheckpointIO(store=node.store, arena=node.arena, start=False)


def test_a_daemon_that_is_gone_at_the_first_save_does_not_end_the_training(node, make, tmp_path, caplog):
    io = make(connect_timeout_s=1)
    node.kill()
    io.save_checkpoint(checkpoint(1.0), tmp_path / "first.ckpt")
    assert "first.ckpt is not saved: no daemon" in caplog.text
    node.start()
    io.save_checkpoint(checkpoint(2.0), tmp_path / "second.ckpt")
    io.teardown()
    assert value_of(tmp_path / "second.ckpt") == 2.0
    assert not (tmp_path / "first.ckpt").exists()


def test_what_is_to_be_removed_goes_when_every_save_of_it_has_ended(make, tmp_path):
    """Its first save is still drained when the second, which had it too, gives way to a newer one."""
    io, saved = make(), checkpoint(1.0)
    io.save_checkpoint(saved, tmp_path / "old.ckpt")
    io.save_checkpoint(saved, tmp_path / "last.ckpt")
    second = io.handle
    io.save_checkpoint(checkpoint(2.0, STEP + 1), tmp_path / "new.ckpt")
    wait_for(lambda: second.end is End.SUPERSEDED)
    io.remove_checkpoint(tmp_path / "old.ckpt")
    io.teardown()
    assert (tmp_path / "new.ckpt").exists()
    assert not (tmp_path / "old.ckpt").exists()


def test_several_of_one_step_are_all_written_however_slow_the_store(make, tmp_path):
    io, saved = make(), checkpoint(1.0)
    io.save_checkpoint(checkpoint(0.0, STEP - 1), tmp_path / "before.ckpt")  # keeps the store busy
    for name in ("best.ckpt", "last.ckpt"):
        io.save_checkpoint(saved, tmp_path / name)
    io.teardown()
    assert [value_of(tmp_path / name) for name in ("best.ckpt", "last.ckpt")] == [1.0, 1.0]


def test_weights_that_are_swapped_within_a_step_do_not_get_into_what_was_saved_before(make, tmp_path):
    """Such as an average's, by way of .data, which torch itself does not count as a change."""
    io, saved = make(), checkpoint(1.0)
    io.save_checkpoint(saved, tmp_path / "plain.ckpt")
    saved["state_dict"]["w"].data.fill_(2.0)
    io.save_checkpoint(saved, tmp_path / "average.ckpt")
    io.teardown()
    assert value_of(tmp_path / "plain.ckpt") == 1.0
    assert value_of(tmp_path / "average.ckpt") == 2.0


def test_nothing_of_a_checkpoint_is_kept_after_teardown(make, tmp_path):
    io, saved = make(), checkpoint(1.0)
    io.save_checkpoint(saved, tmp_path / "a.ckpt")
    io.teardown()
    io.teardown()
    kept = weakref.ref(saved["state_dict"]["w"])
    del saved
    gc.collect()
    assert kept() is None


def test_a_url_is_refused(make):
    with pytest.raises(UsageError, match="is no path"):
        make().save_checkpoint(checkpoint(1.0), "s3://bucket/a.ckpt")


def test_what_was_written_over_a_published_one_without_ckptd_is_what_is_loaded(make, tmp_path):
    path = tmp_path / "last.ckpt"
    io = make()
    io.save_checkpoint(checkpoint(1.0), path)
    io.teardown()
    assert float(io.load_checkpoint(path)["state_dict"]["w"][0]) == 1.0
    io.teardown()
    torch.save(checkpoint(2.0), path)  # into the file itself, of which the store has another name
    for _ in range(2):
        assert float(io.load_checkpoint(path, weights_only=True)["state_dict"]["w"][0]) == 2.0
    os.unlink(path)
    torch.save(checkpoint(3.0), path)
    assert float(io.load_checkpoint(path)["state_dict"]["w"][0]) == 3.0
