"""A trainer's files are where it looks for them once they are durable, wherever daemon or trainer die on the way."""

import json
import os
import shutil
import sys

import pytest
import torch

from ckptd.checkpoint.verify import verify_path
from ckptd.system import failpoints
from tests import pythons
from tests.cluster import wait_for
from tests.faults.ranks import JOB, Ranks, told

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

POINTS = tuple(p for p in failpoints.POINTS if p.startswith("publish."))
WORLD = 2


def is_published(out, step):
    """Whether all files of the step lie there, whole."""
    try:
        states = [torch.load(out / f"global_step{step}" / f"state_{rank}.pt") for rank in range(WORLD)]
        small = [(out / f"global_step{step}/deep/small_{rank}").read_bytes() for rank in range(WORLD)]
    except FileNotFoundError:
        return False
    return all(state["step"] == step for state in states) and small == [b"%d" % step] * WORLD


def save(ranks, step, out):
    tag = f"global_step{step}"
    ranks.call("save_files", step, directory=str(out / tag), pointer=(str(out / "latest"), tag))


def die_while_it_publishes(node, ranks, out, died):
    """The worker of a save dies at the failpoint that the daemon was started with, then the daemon; died: the mark."""
    ranks.call("connect", start=False)
    save(ranks, 10, out)
    wait_for(died.exists)
    node.kill()


@pytest.mark.parametrize("point", POINTS)
def test_a_daemon_that_dies_while_it_publishes(point, tmp_path):
    out = tmp_path / "out"
    with told(str(tmp_path)) as node:
        node.start(CKPTD_FAILPOINT=f"{point}@{tmp_path}/died")
        with Ranks(node, WORLD) as ranks:
            die_while_it_publishes(node, ranks, out, tmp_path / "died")
            if (out / "latest").exists():
                assert is_published(out, 10), "what points to it comes last"
            assert not (out / "global_step10").exists() or is_published(out, 10), "nothing half is ever seen"
            node.start()
            ranks.call("wait", 10)
            wait_for(lambda: (out / "latest").exists() and (out / "latest").read_text() == "global_step10", 20.0)
            assert is_published(out, 10)
            save(ranks, 20, out)
            ranks.call("wait", 20)
            assert is_published(out, 20)
            assert (out / "latest").read_text() == "global_step20"
            store = os.path.join(node.store, JOB)
            wait_for(lambda: not any("UNPUBLISHED" in os.listdir(f"{store}/{name}") for name in os.listdir(store)))
            assert verify_path(store).problems == []
            assert sorted(os.listdir(out)) == ["global_step10", "global_step20", "latest"]


def test_the_next_trainer_has_what_an_earlier_daemon_left(tmp_path):
    """No rank lives that waits for the save: the look into the store publishes it."""
    out = tmp_path / "out"
    with told(str(tmp_path)) as node:
        node.start(CKPTD_FAILPOINT=f"publish.before-pointer@{tmp_path}/died")
        with Ranks(node, WORLD) as ranks:
            die_while_it_publishes(node, ranks, out, tmp_path / "died")
            ranks.kill()
        assert not (out / "latest").exists()
        node.start()
        with Ranks(node, WORLD) as ranks:
            ranks.call("connect", start=False)
            wait_for((out / "latest").exists, 20.0)
            assert is_published(out, 10)


def ckptd(*args):
    done = pythons.run([sys.executable, "-m", "ckptd", *args], capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_publication_whose_arena_was_lost_is_reported_and_made_by_hand(tmp_path):
    """No store says where to: the next daemon leaves it, and who looks is told what to type."""
    out = tmp_path / "out"
    with told(str(tmp_path)) as node:
        node.start(CKPTD_FAILPOINT=f"publish.before-rename@{tmp_path}/died")
        with Ranks(node, WORLD) as ranks:
            die_while_it_publishes(node, ranks, out, tmp_path / "died")
            ranks.kill()
        shutil.rmtree(os.path.join(node.arena, "jobs"))
        node.start()
        with Ranks(node, WORLD) as ranks:
            ranks.call("connect", start=False)
            assert ranks.call("load_files", WORLD)[0]["step"] == 10
            save(ranks, 20, out)
            ranks.call("wait", 20)
            job = os.path.join(node.store, JOB)
            assert not (out / "global_step10").exists()
            path = os.path.join(job, next(name for name in os.listdir(job) if name.startswith("step-000000010")))
            code, said = ckptd("list", job)
            assert code == 0
            assert f"ckptdpublish{path}--toDIRECTORY" in "".join(said.split())
            assert f"ckptd publish {path} --to DIRECTORY" in node.log_text()
            assert "nobody here knows any more where to" in ckptd("prune", "--keep-last", "1", job)[1]
            assert ckptd("publish", path, "--to", str(out))[0] == 2, "somebody's files lie there"
            assert ckptd("publish", path, "--to", path + "/x")[0] == 2, "it is ckptd's own"
            code, said = ckptd("publish", "--json", path, "--to", str(out / "global_step10"))
            assert (code, len(json.loads(said)["files"])) == (0, 3 * WORLD)
            assert is_published(out, 10)
            assert (out / "latest").read_text() == "global_step20"
            assert ckptd("publish", path, "--to", str(out / "again"), "--pointer", str(out / "named"))[0] == 0
            assert (out / "named").read_text() == "again"
            assert "unpublished" not in ckptd("list", job)[1]
            assert verify_path(job).problems == []


def test_a_trainer_that_dies_before_the_drain_ends(tmp_path):
    """The next one has the newest files from memory, while what is published is of the step before; then both agree."""
    out = tmp_path / "out"
    with told(str(tmp_path)) as node:
        node.start("--drain-bandwidth", "1M")
        with Ranks(node, WORLD) as ranks:
            ranks.call("connect", start=False)
            save(ranks, 10, out)
            ranks.call("wait", 10)
            save(ranks, 20, out)
            ranks.call("wait", 20, "staged")
            assert (out / "latest").read_text() == "global_step10"
            assert not (out / "global_step20").exists()
            ranks.kill()
        with Ranks(node, WORLD) as ranks:
            ranks.call("connect", start=False)
            found = ranks.call("load_files", WORLD)
            assert found == [{"step": 20, "tier": "arena", "notes": [], "intact": True}] * WORLD
            ranks.call("wait_newest", timeout_s=60.0)
            wait_for(lambda: (out / "latest").read_text() == "global_step20")
            assert is_published(out, 20)


def test_what_one_rank_cannot_pickle_ends_the_save_on_all_at_once(tmp_path):
    with told(str(tmp_path)) as node:
        node.start()
        with Ranks(node, WORLD) as ranks:
            ranks.call("connect", start=False)
            raised = ranks.call("save_what_cannot_be", 10)
            assert [bool(name) for name in raised] == [True, False]
            assert ranks.call("free_step", 10) == [11] * WORLD, "whatever each has heard of the save's end"
            milestone, end, reason = ranks[1].call("settle", 10, timeout_s=20)
            assert (milestone, end) in {(None, "skipped"), (None, "failed"), (None, "abandoned")}, reason
            ranks.call("save_files", 10)  # the step is free again
            ranks.call("wait", 10)
