"""What happens to a cluster, on machines that really boot: units, sessions, a parallel file system, cables."""

import json
import time

import pytest

from tests.cluster import wait_for
from tests.machines import filesystem, tree
from tests.machines.cluster import furnish_user
from tests.machines.filesystem import STORE
from tests.machines.job import Job, running

pytestmark = pytest.mark.timeout(400)
UNIT = f"ckptd@{tree.USER}"
SAVE_TIMEOUT_S = 10


def status(machine) -> dict:
    return json.loads(machine.user_does("ckptd status --json"))


def job_status(machine, name: str) -> dict:
    """The job's part of the machine's status, empty when its daemon is not there or knows nothing of the job."""
    answer = machine.user_does("ckptd status --json", check=False)
    return next((job for job in json.loads(answer)["jobs"] if job["job"] == name), {}) if answer else {}


def newest(machine, name: str, *milestones: str) -> int:
    """The newest step of the job that has one of the milestones, -1 if none has."""
    checkpoints = job_status(machine, name).get("checkpoints", [])
    return max((c["step"] for c in checkpoints if c["milestone"] in milestones), default=-1)


def wait_newer(machine, name: str, than: int, *milestones: str, timeout_s: float = 60) -> int:
    wait_for(lambda: newest(machine, name, *milestones) > than, timeout_s, every_s=0.5)
    return newest(machine, name, *milestones)


def check_restored(job: Job, before: dict[tuple[int, int], str], *, tiers: set[str] | None = None) -> int:
    """Every rank restored the same step, bit for bit what it saved. The step."""
    lines = job.wait_lines("restored")
    step = int(lines[0].words[0])
    for line in lines:
        assert int(line.words[0]) == step
        assert line.words[2] == before[line.rank, step], f"rank {line.rank} restored other bytes of step {step}"
        assert tiers is None or line.words[1] in tiers, line
    return step


def check_saves(job: Job, *, lost: int = 0) -> None:
    """No save has held up training for longer than was promised, and no more were lost, on any rank, than expected."""
    assert max(float(line.words[2]) for line in job.lines("saved")) <= SAVE_TIMEOUT_S + 1
    steps = {line.words[0] for line in job.lines("lost")}
    assert len(steps) <= lost, job.lines("lost")


@pytest.fixture
def start(machines, logs):
    def start(name: str, *flags: str, launcher: str = "torchrun"):
        return running(machines, name, *flags, launcher=launcher, logs=logs)

    return start


def test_save_drain_status(machines, start):
    with start("plain") as job:
        job.wait_lines("saved")
        wait_newer(machines[1], "plain", -1, "durable")
        found = json.loads(machines[3].user_does("ckptd status --nodes --json"))["jobs"][0]
        assert found["silent"] == []
        assert [node["node"] for node in found["nodes"] if node["report"]] == [m.name for m in machines.all]
        assert machines[3].user_does("ckptd status --nodes").count("■") >= 1
        job.finish()
    before = job.digests()
    listed = json.loads(machines[2].user_does(f"ckptd list --json {STORE}/plain"))
    assert max(checkpoint["step"] for checkpoint in listed["jobs"][0]["checkpoints"]) == max(job.steps("saved"))
    machines[4].user_does(f"ckptd verify {STORE}/plain")
    with start("plain") as again:
        assert check_restored(again, before) == max(job.steps("saved"))
        again.finish()


def test_mpiexec(machines, start):
    with start("mpi", launcher="mpiexec") as job:
        job.wait_lines("saved", 8)
        wait_newer(machines[1], "mpi", -1, "protected", "durable")
        job.kill()
    with start("mpi", launcher="mpiexec") as again:
        check_restored(again, job.digests(), tiers={"arena"})
        again.finish()


def test_restart_in_a_drain(machines, start):
    with start("restart", "--mib=48", "--save-every=8") as job:
        wait_for(lambda: (job_status(machines[1], "restart").get("drain") or {}).get("nbytes_done"), 90, every_s=0.05)
        machines[2].root_does(f"systemctl restart {UNIT}")
        before = max(job.steps("saved"))
        wait_newer(machines[1], "restart", before, "durable")
        check_saves(job, lost=2)
        job.finish()
    assert "adopted" in machines[2].root_does(f"journalctl -u {UNIT} --no-pager")


def test_kill_of_a_daemon(machines, start):
    with start("killed") as job:
        job.wait_lines("saved")
        before = wait_newer(machines[1], "killed", -1, "protected", "durable")
        for number in (1, 3):  # the coordinator's, and another
            machines[number].root_does(f"systemctl kill --kill-whom=main -s KILL {UNIT}")
            before = wait_newer(machines[1], "killed", max(before, *job.steps("saved")), "protected", "durable")
        check_saves(job, lost=4)
        job.finish()


def test_a_machine_is_replaced(machines, start):
    lost = machines[4]
    with start("replaced", "--drain-every=1000000") as job:
        job.wait_lines("saved", 8)
        protected = wait_newer(machines[1], "replaced", 0, "protected")
        lost.power_off()
        job.kill()
    lost.boot()
    filesystem.mount(lost)
    furnish_user(lost)
    with start("replaced") as again:
        step = check_restored(again, job.digests(), tiers={"arena", "rebuilt"})
        assert step >= protected
        assert next(line.words[1] for line in again.lines("restored") if line.rank == 3) == "rebuilt"
        wait_newer(machines[1], "replaced", step, "protected", "durable")
        again.finish()


def test_a_partition(machines, start):
    with start("parted") as job:
        job.wait_lines("saved")
        before = wait_newer(machines[1], "parted", -1, "protected", "durable")
        machines.network.cut(4)
        time.sleep(20)
        problem = [
            node["problem"] for node in job_status(machines[1], "parted").get("nodes", []) if not node["reachable"]
        ]
        machines.network.mend(4)
        assert problem, "the partition was not told"
        wait_newer(machines[1], "parted", max(before, *job.steps("saved")), "durable", timeout_s=120)
        check_saves(job, lost=2)
        job.finish()


def test_a_brick_goes_and_returns(machines, start):
    with start("brick") as job:
        job.wait_lines("saved")
        filesystem.take_brick(machines[2])
        gone_at = max(job.steps("saved"))
        wait_newer(machines[1], "brick", gone_at, "durable")
        filesystem.return_brick(machines[2])
        wait_newer(machines[1], "brick", max(job.steps("saved")), "durable")
        check_saves(job, lost=2)
        job.finish()
    machines[2].user_does(f"ckptd verify {STORE}/brick")


def test_a_hung_mount(machines, start):
    with start("hung") as job:
        job.wait_lines("saved")
        wait_newer(machines[1], "hung", -1, "durable")
        filesystem.hang(machines[1])
        try:
            staged = wait_newer(machines[1], "hung", max(job.steps("saved")) + 4, "protected", "staged")
            job.wait_more(8)
            wait_for(
                lambda: "store: no answer for" in machines[1].user_does("ckptd status", timeout_s=10), 60, every_s=1
            )
        finally:
            filesystem.resume(machines[1])
        wait_newer(machines[1], "hung", staged, "durable")
        check_saves(job, lost=40)
        job.finish()


def test_a_user_logs_out(machines, start):
    """The user's last session ends, and logind clears what is the user's: not while the user lingers."""
    with start("logout", "--drain-every=1000000") as job:
        job.wait_lines("saved", 8)
        wait_newer(machines[1], "logout", 0, "protected")
        job.kill()
    for machine in machines.all:
        wait_for(lambda machine=machine: "closing" not in machine.root_does("loginctl list-sessions"), 20)
        assert machine.root_does(f"loginctl list-sessions --no-legend | grep -c {tree.USER}", check=False) == "0"
    with start("logout") as again:
        check_restored(again, job.digests(), tiers={"arena"})
        again.finish()


def test_a_user_logs_out_who_does_not_linger(machines, start):
    """What was staged is gone, as was foretold: the daemon says why and gives way to one that ranks find."""
    machine = machines[2]
    machine.root_does(f"loginctl disable-linger {tree.USER}")
    assert "enable-linger" in machine.user_does("ckptd doctor", check=False)
    wait_for(lambda: "ckptd" not in machine.root_does("ls /dev/shm"), 60, every_s=0.5)
    wait_for(lambda: "ckptd" in machine.root_does("ls /dev/shm"), 60, every_s=0.5)
    assert "enable-linger" in machine.root_does(f"journalctl -u {UNIT} --no-pager")
    machine.root_does(f"loginctl enable-linger {tree.USER}")
    with start("again") as job:
        job.wait_lines("saved")
        wait_newer(machines[1], "again", -1, "durable")
        job.finish()


def test_a_cgroup_at_its_memory_limit(machines, start):
    """What does not fit is refused with the numbers, before the kernel kills; the others' training goes on."""
    machine = machines[3]
    daemon = machine.root_does(f"systemctl show -p MainPID {UNIT}")
    machine.limit_memory(UNIT, 200 << 20)
    try:
        with start("large", "--mib=64") as job:
            job.wait_lines("lost", 1)
            job.wait_step(8)
            job.kill()
        assert "cgroup" in " ".join(job.lines("lost")[0].words), job.lines("lost")
        with start("small", "--mib=4") as job:
            job.wait_lines("saved")
            wait_newer(machines[1], "small", -1, "durable")
            job.finish()
    finally:
        machine.limit_memory(UNIT, 0)
    assert machine.root_does(f"systemctl show -p MainPID {UNIT}") == daemon, "the kernel killed it"


def test_preemption(machines, start):
    with start("preempted", "--drain-every=1000000") as job:
        job.wait_lines("saved", 8)
        assert newest(machines[1], "preempted", "durable") <= 0, "only the first is due by itself"
        for machine in machines.all:
            machine.user_does("ckptd drain --wait --job preempted --timeout 60s || [ $? -eq 4 ]")
        drained = newest(machines[1], "preempted", "durable")
        assert drained > 0
        job.kill()
    for machine in machines.all:
        machine.root_does(f"systemctl stop {UNIT}; rm -rf /dev/shm/ckptd-*; systemctl start {UNIT}")
    with start("preempted") as again:
        assert check_restored(again, job.digests(), tiers={"pfs"}) >= drained
        again.finish()


def test_upgrade_under_a_job(machines, start):
    version = tree.upgraded_version()
    with start("upgraded") as job:
        job.wait_lines("saved")
        wait_newer(machines[1], "upgraded", -1, "protected", "durable")
        for machine in machines.all:
            wheel = f"/wheels/ckptd-{version}-py3-none-any.whl"
            machine.root_does(f"pip install -q --no-index --no-deps --root-user-action=ignore {wheel}")
            machine.root_does(f"systemctl restart {UNIT}")
            assert status(machine)["version"] == version
        wait_newer(machines[1], "upgraded", max(job.steps("saved")), "protected", "durable")
        wait_newer(machines[1], "upgraded", max(job.steps("saved")), "durable")
        check_saves(job, lost=8)
        job.finish()
