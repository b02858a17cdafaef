"""Where the kernel cannot prove who writes, nothing is copied late, and that is said once."""

import ctypes
import os
import signal
import time

import pytest
import torch

from ckptd.shared.format.integrity import XXH3
from ckptd.shared.protocol.journal import Staged
from ckptd.shared.stores.kinds import open_files
from ckptd.store.journal import read_journal
from ckptd_client import UsageError
from ckptd_client._local import page_guard
from ckptd_client._local.late_memory import late_memory
from ckptd_client._local.page_guard import HUGE_NBYTES, NoProofError, PageGuard
from tests.cluster import wait_for
from tests.unit.client.save.test_late_proof import pytestmark as needs_proof
from tests.unit.client.save.writers import Victim

# Denies userfaultfd(2) with EPERM, as the profiles of containers do; then saves, and tells what is in force.
_RANK = """
import ctypes, logging, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
if "seccomp" in sys.argv[1:]:
    number = {"x86_64": 323, "aarch64": 282}[__import__("platform").machine()]
    steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code)))
    assert libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()
if "thp" in sys.argv[1:]:
    assert libc.prctl(41, 1, 0, 0, 0) == 0  # PR_SET_THP_DISABLE
logging.basicConfig(level=logging.WARNING, format="%(message)s")
import time
import torch
import ckptd_client
from tests.unit.client.save.writers import Victim
victim = Victim()
with ckptd_client.connect(sys.argv[1], start=False) as client:
    client.attach(victim.optimizer)
    for i in range(8):
        expected = victim.large.detach().clone()
        state = victim.state if i % 2 else {"large": victim.large}  # plans in turn say nothing twice
        client.save(state).wait("staged", 60)
        assert client.stats().last_late_nbytes == 0
        victim.optimizer.step()
        time.sleep(0.1)
    back = {"large": torch.zeros_like(expected), "small": torch.zeros(3)}
    client.load(back)
    assert torch.equal(back["large"], expected)
    print("in force:", client.stats().late)
"""


@pytest.mark.parametrize(("what", "reason"), [("seccomp", "Operation not permitted"), ("thp", "no huge pages")])
def test_without_the_calls_nothing_is_late_and_it_is_said_once(what, reason, node, job):
    process = node.run(_RANK, job, what)
    out, err = (part.decode() for part in process.communicate(timeout=120))
    assert process.returncode == 0, err
    assert out.startswith("in force: off: "), out
    assert reason in out
    assert err.count("nothing of the host's memory is copied late") == 1, err
    assert 'verify="samples"' in err


@pytest.mark.parametrize("missing", ["_SYS_USERFAULTFD", "_PAGEMAP_SCAN", "_UFFDIO_API"])
def test_a_kernel_without_a_call_is_no_proof(missing, monkeypatch):
    value = {os.uname().machine: 100_000} if missing == "_SYS_USERFAULTFD" else 0
    monkeypatch.setattr(page_guard, missing, value)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(NoProofError):
        PageGuard()
    assert len(os.listdir("/proc/self/fd")) == before


def in_the_beginning():
    """What is in force where the proof was asked for and nothing was saved yet."""
    try:
        late_memory()
    except NoProofError as error:
        return f"off: {error}"
    return "proof, but nothing is late yet: its memory is being put together into huge pages"


@pytest.mark.parametrize("verify", ["off", "samples", "proof"])
def test_what_the_user_asked_for_is_in_force_and_in_the_status(verify, join, node, job):
    victim, client = Victim(), join()
    assert client.stats().late == ""
    client.attach(victim.optimizer, verify=verify)
    assert client.stats().late == {"proof": in_the_beginning()}.get(verify, verify)
    handle = client.save(victim.state)
    victim.optimizer.step()
    handle.wait("staged", 60)
    if verify == "off":
        assert client.stats().last_late_nbytes == 0
    if verify == "samples":
        assert client.stats().last_late_nbytes == victim.large.nbytes + victim.small.nbytes
    assert [rank.late for rank in node.job(job).ranks] == [client.stats().late]


def test_the_journal_has_what_was_copied_late_and_the_stall_up_to_the_hand_over(join, node, job):
    victim, client = Victim(), join()
    client.attach(victim.optimizer, verify="samples")
    began = time.monotonic()
    handle = client.save(victim.state)
    victim.optimizer.step()
    handle.wait("durable", 60)
    lasted_s = time.monotonic() - began
    late_nbytes = client.stats().last_late_nbytes
    client.close()
    files = open_files(f"{node.store}/{job}", XXH3)
    staged = wait_for(lambda: next((e for e in read_journal(files).entries if isinstance(e, Staged)), None))
    assert staged.late_nbytes == late_nbytes > 0
    assert 0 < staged.stall_s <= handle.stall_s + 0.001
    assert staged.mean_stall_s == staged.stall_s
    assert 0 <= staged.seconds <= lasted_s - staged.stall_s, "the stall is no part of it"


def test_another_word_is_a_misuse(join):
    with pytest.raises(UsageError, match='"proof", "samples" or "off"'):
        join().attach(Victim().optimizer, verify="maybe")


@needs_proof[0]
def test_a_forked_child_has_no_part_in_the_proof_and_takes_none_of_it(join):
    victim, client = Victim(), join()
    client.attach(victim.optimizer)

    def save():
        handle = client.save(victim.state)
        wait_for(lambda: not late_memory().busy)
        victim.optimizer.step()
        handle.wait("staged", 60)
        return client.stats().last_late_nbytes

    save()
    assert save() >= HUGE_NBYTES
    child = os.fork()
    if not child:
        ok = (
            client._saving.overlapping._memory.guard._fd == -1
            and late_memory() is not client._saving.overlapping._memory
        )
        os._exit(0 if ok else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert save() >= HUGE_NBYTES
    expected = victim.large.detach().clone()
    handle = client.save(victim.state)
    child = os.fork()
    if not child:
        ctypes.memset(victim.address, 0, victim.large.nbytes)
        os._exit(0)
    os.waitpid(child, 0)
    victim.optimizer.step()
    handle.wait("staged", 60)
    back = {"large": torch.zeros_like(expected), "small": torch.zeros(3)}
    client.load(back)
    assert torch.equal(back["large"], expected)


def test_a_forked_child_that_closes_its_parents_client_ends_at_once_and_the_parent_goes_on(join):
    victim, client = Victim(), join()
    client.attach(victim.optimizer)
    client.save(victim.state).wait("staged", 60)
    with late_memory()._lock:  # as a thread has it that puts memory together just now
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest's handler would go on with the test, here
            signal.alarm(10)
            client.close()
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    victim.optimizer.step()
    client.save(victim.state).wait("staged", 60)
