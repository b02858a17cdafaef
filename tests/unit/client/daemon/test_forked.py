"""A forked child has its parent's client and nothing of its daemon: calls are refused at once, and disturb nobody."""

import contextlib
import os
import signal
import threading
import time

import pytest
import torch

import ckptd_client
from ckptd_client import Client, SaveHandle, UsageError
from ckptd_client.dcp import CkptdStager, CkptdWriter
from tests.cluster import wait_for

LONG = os.environ.get("FAULTS") == "long"
SECONDS = 10  # then a child is killed

REFUSED = {  # what needs the daemon, other ranks or the slots
    "are_still": lambda client, handle, state: client.are_still(handle, {}),
    "attach": lambda client, handle, state: client.attach(torch.optim.SGD([torch.ones(1)])),
    "gather": lambda client, handle, state: client.gather(state),
    "latest": lambda client, handle, state: client.latest(),
    "load": lambda client, handle, state: client.load(state),
    "load_files": lambda client, handle, state: client.load_files(),
    "load_from": lambda client, handle, state: client.load_from("/nowhere", state),
    "preempted": lambda client, handle, state: client.preempted(2),
    "prepare": lambda client, handle, state: client.prepare(state),
    "save": lambda client, handle, state: client.save(state),
    "save_files": lambda client, handle, state: client.save_files({"a": b"bytes"}),
    "step": lambda client, handle, state: client.step(2),
    "steps": lambda client, handle, state: client.steps(),
    "wait": lambda client, handle, state: client.wait(),
}
ALLOWED = {"close", "free_step", "group", "incarnation", "job", "run", "stats"}
OF_HANDLES = {
    "wait": lambda client, handle, state: handle.wait("durable"),
    "milestone": lambda client, handle, state: handle.milestone,
    "end": lambda client, handle, state: handle.end,
}
OF_HANDLES_ALLOWED = {"step", "save_id", "reason", "stall_s"}
OTHERS = {
    "a writer of DCP's": lambda client, handle, state: CkptdWriter(client).storage_meta(),
    "a stager of DCP's": lambda client, handle, state: CkptdStager(CkptdWriter(client)).stage(state),
}


def public(kind):
    return {name for name in dir(kind) if not name.startswith("_")}


def in_child(call):
    """What the call does in a forked child: its value, or its error's kind and text. Fails when it hangs."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest's handler would go on with the test, here
        signal.alarm(SECONDS)
        try:
            text = repr(call())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writes, text.encode())
        os._exit(0)
    os.close(writes)
    with open(reads, "rb") as file:
        text = file.read().decode()
    assert os.waitpid(child, 0)[1] == 0, "the child hung"
    return text


@contextlib.contextmanager
def waiting(client):
    """Another thread has the client's lock as often as not, as it does while it waits for news."""
    over = threading.Event()

    def wait():
        while not over.is_set():
            client._staging.pump(0.05)

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.fixture(name="saved")
def fixture_saved(join):
    client, state = join(), {"w": torch.arange(1000.0)}
    return client, client.save(state, 1).wait("staged", 60), state


def assert_goes_on(client, state, step):
    assert client.save(state, step).wait("durable", 60).end == "durable"
    back = {"w": torch.zeros(1000)}
    assert client.load(back).step == step
    assert torch.equal(back["w"], state["w"])


def test_each_public_method_is_in_a_table():
    assert public(Client) == {*REFUSED} | ALLOWED
    assert public(SaveHandle) == {*OF_HANDLES} | OF_HANDLES_ALLOWED


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "a thread waits"])
def test_what_needs_the_daemon_is_refused_by_pid_with_what_to_type(saved, busy):
    client, handle, state = saved
    calls = REFUSED | {f"handle.{name}": call for name, call in OF_HANDLES.items()} | OTHERS
    with waiting(client) if busy else contextlib.nullcontext():
        for name, call in list(calls.items())[:: 1 if busy or LONG else 4]:
            began = time.monotonic()
            told = in_child(lambda call=call: call(client, handle, state))
            assert time.monotonic() - began < 5, name
            assert told.startswith("UsageError: "), (name, told)
            assert f"of process {os.getpid()}" in told, (name, told)
            assert "a child forked from it" in told, (name, told)
            assert f"call it in process {os.getpid()}" in told, (name, told)
            assert "connect(job=..., alone=True)" in told, (name, told)
    assert_goes_on(client, state, 2)


def test_preempted_looks_at_no_board_that_only_its_parent_has(saved):
    client, _, _ = saved
    assert not client.preempted(1)
    assert in_child(lambda: client.preempted(2)).startswith("UsageError: ")
    assert not client.preempted(2)


def test_what_only_looks_works_in_a_child(saved):
    client, handle, _ = saved
    looks = [
        "job", "incarnation", "run", "stats().saves", "free_step(1)", "group.rank",
    ]  # fmt: skip
    for look in looks:
        here = eval(f"client.{look}", {"client": client})  # noqa: S307 - of the line above
        assert in_child(lambda look=look: eval(f"client.{look}", {"client": client})) == repr(here)  # noqa: S307
    assert in_child(lambda: handle.step) == "1"


def test_a_child_that_leaves_the_client_disturbs_none(saved):
    client, _, state = saved

    def leaves():
        with pytest.raises(UsageError), client:
            client.save(state)
        client.close()

    wait_for(lambda: client._saving.preparing._thread is None)  # it hears of slots
    before = client._link.slots.count
    assert in_child(leaves) == "None"
    assert client._link.slots.count == before
    assert_goes_on(client, state, 2)


def test_a_child_may_be_a_job_of_its_own(saved, node, job):
    client, _, state = saved

    def own():
        with ckptd_client.connect(f"{job[:50]}-child", store=node.store, arena=node.arena, start=False) as mine:
            return mine.save(state, 7).wait("durable", 60).end

    assert "durable" in in_child(own)
    assert_goes_on(client, state, 2)


def test_a_child_of_a_child_is_reported_as_well(saved):
    client, _, _ = saved
    told = in_child(lambda: in_child(client.steps))
    assert f"of process {os.getpid()}" in told


# Workers that end in the ordinary way, with a copy running, an optimizer attached, and a client that is collected.
_TRAINING = """
import gc, sys, torch, ckptd_client
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self): return 16
    def __getitem__(self, i):
        gc.collect()
        return torch.full((4,), float(i))

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
client = ckptd_client.connect(sys.argv[1], start=False, drain_every=100)
print("connected", file=sys.stderr, flush=True)
client.attach(optimizer, verify="samples")
for epoch in range(3):
    for batch in DataLoader(Data(), batch_size=4, num_workers=2, multiprocessing_context="fork"):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        client.save({"model": model, "optimizer": optimizer})
client.save({"model": model, "optimizer": optimizer}, drain=True).wait("durable", 60)
client.close()
print("done")
"""


def test_workers_that_only_inherit_print_nothing(node, job):
    process = node.run(_TRAINING, job)
    out, err = (part.decode() for part in process.communicate(timeout=120))
    _, connected, err = err.partition("connected\n")  # before: that the store is new
    assert (process.returncode, out.split(), connected, err) == (0, ["done"], "connected\n", "")
