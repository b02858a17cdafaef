"""Ranks under torchrun, under mpiexec and alone: each gets its own back, and a job that does not fit is told so."""

import json
import os
import sys
import threading
import time

import pytest
import torch

import ckptd_client
from ckptd_client import CkptdError, RestoreError, UsageError, _connect
from ckptd_client._local.rank import Group
from tests import pythons
from tests.cluster import CODE, Node
from tests.ports import free_port

BIN = os.path.dirname(sys.executable)
LIFE = """
import json, os, sys
import torch
import ckptd_client

folder, job, steps, group = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
if group == "gloo":
    torch.distributed.init_process_group("gloo")
if group == "mpi":
    from mpi4py import MPI
    rank = MPI.COMM_WORLD.Get_rank()
else:
    rank = int(os.environ.get("RANK", "0"))
torch.manual_seed(1000 + rank)
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer, "rng": torch.get_rng_state(), "drawn": [], "rank": rank}
with ckptd_client.connect(job, start=False) as client:
    restored = client.load(state)
    if restored:
        assert state["rank"] == rank, (state["rank"], rank)
        torch.set_rng_state(state["rng"])
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.rand(4, 3)).sum().backward()
        optimizer.step()
        state["drawn"].append(torch.rand(()).item())
        state["rng"].copy_(torch.get_rng_state())
        client.save(state)
    newest = client.wait("durable", 60)
    out = {
        "drawn": state["drawn"], "weights": [p.tolist() for p in model.parameters()], "end": newest.end,
        "restored": [restored.step, restored.tier, restored.notes] if restored else None, "plans": client.stats().plans,
    }
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump(out, file)
if group == "gloo":
    torch.distributed.destroy_process_group()
"""


def torchrun(ranks):
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


LAUNCHES = {
    "torchrun with a process group": (2, "gloo", torchrun(2)),
    "torchrun alone": (3, "none", torchrun(3)),
    "mpiexec": (2, "mpi", [os.path.join(BIN, "mpiexec"), "-iface", "lo", "-n", "2", sys.executable]),
    "alone": (1, "none", [sys.executable]),
}
OTHERS_ARE_LIKE_THESE = ("torchrun with a process group", "mpiexec")


def live(node, tmp_path, job, steps, launch):
    """One life of the job; what its ranks wrote at the end."""
    ranks, group, command = LAUNCHES[launch]
    script = tmp_path / "life.py"
    script.write_text(LIFE)
    arguments = (str(script), str(tmp_path), job, str(steps), group)
    node.complete(*command, *arguments, timeout_s=60, HYDRA_IFACE="lo", FI_PROVIDER="tcp", PYTHONWARNINGS="ignore")
    out = []
    for rank in range(ranks):
        path = tmp_path / f"{rank}.json"
        out.append(json.loads(path.read_text()))
        path.unlink()
    return out


def undisturbed(rank, steps):
    """What the life above draws and learns when it is one life."""
    torch.manual_seed(1000 + rank)
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    drawn = []
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.rand(4, 3)).sum().backward()
        optimizer.step()
        drawn.append(torch.rand(()).item())
    return drawn, [parameter.tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("launch", LAUNCHES if os.environ.get("FAULTS") == "long" else OTHERS_ARE_LIKE_THESE)
def test_every_rank_goes_on_where_it_was_as_if_nothing_had_been(launch, node, tmp_path, job, join):
    first = live(node, tmp_path, job, 3, launch)
    second = live(node, tmp_path, job, 2, launch)
    for rank, (one, two) in enumerate(zip(first, second, strict=True)):
        assert one["restored"] is None
        assert two["restored"] == [2, "pfs", []], rank
        assert two["drawn"][:3] == one["drawn"]
        assert (two["drawn"], two["weights"]) == undisturbed(rank, 5)
        assert {one["end"], two["end"]} == {"durable"}
        assert one["plans"] <= 2, "AdamW has no state before its first step"
    assert len({tuple(one["drawn"]) for one in first}) == len(first), "each rank has a generator of its own"
    model = torch.nn.Linear(3, 3)
    alone = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "rng": torch.get_rng_state()}
    alone |= {"drawn": [], "rank": 9}
    assert join().load(alone).step == 4
    weights = [parameter.tolist() for parameter in model.parameters()]
    assert (alone["drawn"], weights, alone["rank"]) == (*undisturbed(0, 5), 0), "one rank goes on as rank 0"


@pytest.fixture
def ranks(node, job, monkeypatch):
    """Runs one function per rank, each in a thread with a client of its own; their results or errors, and the time."""
    clients = []

    def run(*parts, name=job, sizes=None, session="session", **settings):
        results = [None] * len(parts)
        began = time.monotonic()

        def one(rank, part):
            try:
                with lock:
                    size = sizes[rank] if sizes else len(parts)
                    monkeypatch.setattr(_connect, "find_group", lambda *_: Group(rank, size, session))
                    link_up = ckptd_client.connect(name, store=node.store, arena=node.arena, start=False, **settings)
                    clients.append(link_up)
                barrier.wait(10)
                results[rank] = part(link_up)
            except CkptdError as error:
                results[rank] = error
                barrier.abort()
            except threading.BrokenBarrierError:
                results[rank] = "never began"

        lock, barrier = threading.Lock(), threading.Barrier(len(parts))
        threads = [threading.Thread(target=one, args=item) for item in enumerate(parts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), "a rank hangs"
        while clients:
            clients.pop().close()
        return results, time.monotonic() - began

    return run


def save_one(step):
    return lambda link_up: link_up.save({"w": torch.full((3,), float(step))}, step).wait("durable", 60).end


def load_one(step=None):
    return lambda link_up: link_up.load({"w": torch.zeros(3)}, step)


def test_a_job_of_another_size_goes_on(ranks):
    def load(link_up):
        state = {"w": torch.zeros(3)}
        restored = link_up.load(state)
        return restored.step, restored.tier, restored.notes, state["w"].tolist()

    assert ranks(save_one(5), save_one(5))[0] == ["durable"] * 2
    for count in (3, 1):
        results, seconds = ranks(*[load] * count, session=f"of-{count}")
        assert results == [(5, "pfs", [], [5.0] * 3)] * count
        assert seconds < 10


def test_tensors_that_another_rank_saved_are_read_from_memory(ranks):
    def swap(rank):
        def run(link_up):
            link_up.save({f"of {rank}": torch.zeros(3)}, 0).wait("durable", 60)
            assert link_up.save({f"of {rank}": torch.full((3,), rank + 1.0)}, 1).wait("staged", 60).end != "durable"
            state = {"of 0": torch.zeros(3), "of 1": torch.zeros(3)}
            restored = link_up.load(state)
            return restored.step, restored.tier, restored.notes, state["of 0"].tolist(), state["of 1"].tolist()

        return run

    results, seconds = ranks(swap(0), swap(1), drain_every=100)
    assert results == [(1, "arena", [], [1.0] * 3, [2.0] * 3)] * 2
    assert seconds < 10


def test_a_misfit_in_a_job_of_another_size_is_reported_on_all_ranks(ranks):
    def load(link_up):
        return link_up.load({"w": torch.zeros(3), "v": torch.zeros(1)})

    assert ranks(save_one(0), save_one(0))[0] == ["durable"] * 2
    results, seconds = ranks(load, load, load, session="later")
    assert all(isinstance(result, RestoreError) for result in results), results
    assert all("state['v']: a tensor in the state, none in the checkpoint" in str(result) for result in results)
    assert seconds < 10


def test_ranks_that_load_different_steps_are_reported_on_all_ranks(ranks):
    def both(link_up):
        save_one(0)(link_up)
        return save_one(1)(link_up)

    assert ranks(both, both)[0] == ["durable"] * 2
    results, seconds = ranks(load_one(0), load_one(1), session="later")
    assert all(isinstance(result, UsageError) for result in results), results
    assert all("different steps" in str(result) for result in results)
    assert seconds < 10
    results, _ = ranks(load_one(0), load_one(0), session="latest")
    assert [result.step for result in results] == [0, 0]


def test_ranks_that_save_different_steps_are_reported_on_all_ranks(ranks):
    results, seconds = ranks(save_one(1), save_one(2))
    assert all("ranks disagree about the step of one save" in str(result) for result in results), results
    assert seconds < 10


def test_ranks_that_disagree_about_the_size_are_reported(ranks):
    results, seconds = ranks(load_one(), load_one(), sizes=[2, 3])
    assert any("rank 1 says the job has 3 ranks, others say 2" in str(result) for result in results), results
    assert seconds < 10


def test_a_rank_that_was_refused_at_admission_is_not_waited_for(tmp_path, monkeypatch):
    def connect(rank, size):
        monkeypatch.setattr(_connect, "find_group", lambda *_: Group(rank, size, "session"))
        return ckptd_client.connect("door", store=node.store, arena=node.arena, start=False)

    with Node(str(tmp_path)) as node:
        node.start("--stage-timeout-s", "4s")
        with connect(0, 2) as first:
            with pytest.raises(UsageError, match="rank 1 says the job has 3 ranks"):
                connect(1, 3)
            began = time.monotonic()
            with pytest.raises(RestoreError, match="rank"):
                first.load({})
            assert time.monotonic() - began < 3.9


def test_a_misfit_on_one_rank_is_reported_on_all_ranks(ranks):
    assert ranks(save_one(0), save_one(0))[0] == ["durable"] * 2
    results, seconds = ranks(load_one(), lambda link_up: link_up.load({"w": torch.zeros(4)}), session="later")
    assert all(isinstance(result, RestoreError) for result in results), results
    assert all("state['w']" in str(result) for result in results)
    assert "rank 1" in str(results[0])
    assert seconds < 10


def test_a_rank_that_is_missing_ends_the_load_of_the_others_when_it_closes(ranks):
    assert ranks(save_one(0), save_one(0))[0] == ["durable"] * 2
    results, seconds = ranks(load_one(), lambda link_up: link_up.close(), session="later")
    assert "rank 1" in str(results[0])
    assert isinstance(results[0], RestoreError)
    assert seconds < 10


TORCHRUN = {"WORLD_SIZE": "4", "RANK": "0", "TORCHELASTIC_RUN_ID": "r", "LOCAL_WORLD_SIZE": "2"}
LOST = [
    ({"WORLD_SIZE": "2"}, "RANK, MASTER_ADDR and MASTER_PORT are not set\n.*torchrun or mpiexec"),
    ({"PMI_SIZE": "2"}, "mpi4py cannot be imported"),
    (TORCHRUN, "2 of the job's 4 ranks run on this node.*\n.*call torch.distributed.init_process_group before connect"),
]


@pytest.mark.parametrize(("environ", "message"), LOST)
def test_ranks_that_cannot_find_each_other_learn_what_to_call(environ, message, monkeypatch):
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    if "PMI_SIZE" in environ:
        monkeypatch.setitem(sys.modules, "mpi4py", None)
    for item in environ.items():
        monkeypatch.setenv(*item)
    with pytest.raises(UsageError, match=message):
        _connect.find_group()


def test_a_job_that_is_started_twice_under_one_name_and_port_is_two_sessions(tmp_path):
    """The fence of the store tells sessions apart by their names."""
    script = tmp_path / "say.py"
    script.write_text(
        f"import os\nfrom ckptd_client._local.rank import find_group\n"
        f"said = [find_group().session for _ in range(2)]\n"
        f"open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'a').write(' '.join(said) + '\\n')\n"
    )
    port = free_port()
    command = [*torchrun(2)[:3], "--rdzv-id", "job", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    for _ in range(2):
        pythons.run(
            [*command, "--nproc-per-node", "2", str(script)], check=True, timeout=120,
            env=os.environ | {"PYTHONPATH": CODE, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    said = [[line.split() for line in (tmp_path / str(rank)).read_text().splitlines()] for rank in range(2)]
    assert said[0] == said[1]
    assert len({name for life in said[0] for name in life}) == 4
