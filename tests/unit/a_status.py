"""A busy daemon's Status for the tests of everything that shows one."""

from typing import Any

import msgspec

from ckptd.shared.base.ids import SaveId
from ckptd.shared.protocol.status import (
    SCHEMA,
    CheckpointStatus,
    DrainStatus,
    Goodput,
    Histogram,
    JobStatus,
    NodeReport,
    NodeStatus,
    PaceStatus,
    RankStatus,
    ScrubStatus,
    Status,
    TotalsStatus,
    WorkerStatus,
)
from tests.runs import RUN

GIB = 1 << 30
STORE = "/scratch/project_465000123/someone/checkpoints/with/a/path/that/does/not/fit/in/one/line"


def checkpoint(step: int, phase: str, milestone: str | None = None, **changes: Any) -> CheckpointStatus:
    values = {
        "step": step, "incarnation": 4, "counter": step, "phase": phase, "milestone": milestone, "end": None,
        "reason": "", "tiers": ["arena"], "ranks": 16, "world_size": 16, "nbytes": 376 * GIB, "age_s": 200.0,
    }  # fmt: skip
    return CheckpointStatus(**values | changes)


def rank(number: int, **changes: Any) -> RankStatus:
    values = {
        "rank": number, "host": "node03", "pid": 4000 + number, "alive": True, "slots": 3, "slots_in_use": 2,
        "slot_nbytes": 24 * GIB, "newest_step": 1300,
    }  # fmt: skip
    return RankStatus(**values | changes)


def node(number: int, **changes: Any) -> NodeStatus:
    values = {
        "node": f"node{number:02d}", "domain": f"rack{number // 2}", "ranks": [*range(4 * number, 4 * number + 4)],
        "reachable": True, "set_index": 0, "encoded_step": 1300,
    }  # fmt: skip
    return NodeStatus(**values | changes)


def report(number: int, **changes: Any) -> NodeReport:
    values = {
        "version": "0.1.0", "pid": 4242, "uptime_s": 60.0, "budget_nbytes": 100 * GIB, "used_nbytes": 61 * GIB,
        "tightest_limit": "MemAvailable of /proc/meminfo", "problems": [],
        "ranks": [
            rank(4 * number + place, drain_nbytes=10 * GIB, drain_nbytes_done=done * GIB)
            for place, done in enumerate((10, 7, 2, 0))
        ],
    }  # fmt: skip
    return NodeReport(**values | changes)


def drain(**changes: Any) -> DrainStatus:
    values = {
        "save": SaveId(4, 1300, 1300, RUN), "nbytes": 376 * GIB, "nbytes_done": 150 * GIB, "seconds": 120.0,
        "bytes_per_s": 1.25 * GIB, "seconds_left": 180.8, "attempt": 1,
    }  # fmt: skip
    return DrainStatus(**values | changes)


def goodput(**changes: Any) -> Goodput:
    values = {
        "total_s": 10_000.0, "training_s": 9_460.0, "stall_s": 26.0, "restore_s": 14.0, "repeated_s": 200.0,
        "start_s": 300.0, "unexplained_s": 0.0, "idle_s": 0.0, "ettr": 0.946, "failures": 3, "step_s": 5.9,
    }  # fmt: skip
    return Goodput(**values | changes)


def job(**changes: Any) -> JobStatus:
    values = {
        "job": "llama-7b", "store": STORE, "incarnation": 4, "world_size": 16, "drain": drain(),
        "ranks": [rank(number, alive=number != 15) for number in range(16)],
        "checkpoints": [
            checkpoint(1350, "staging", ranks=9, age_s=None),
            checkpoint(1300, "draining", "staged"),
            checkpoint(1250, "superseded", "protected", end="superseded", tiers=["arena", "peer"]),
            checkpoint(1200, "failed", end="abandoned", reason="rank 15 never delivered within 300 s"),
            checkpoint(1100, "durable", "durable", tiers=["pfs"]),
        ],
        "ends": {"durable": 1, "superseded": 1, "abandoned": 1},
        "errors": ["rank 15 ended without close\n  hint: its memory is kept for 24h: restart the job"],
        "pace": PaceStatus(
            save_every_s=20.0, save_every_steps=50, drain_s=34.0, drain_bytes_per_s=1.25 * GIB, outrun=3
        ),
        "goodput": goodput(),
        "totals": TotalsStatus(
            runs=4, failed_runs=2, staged_nbytes=9 * GIB, drained_nbytes=3 * GIB, losses={"node": 2, "ranks": 1},
            lost_steps=70, missing=0,
        ),
        "scrub": ScrubStatus(
            memory_nbytes=8 * GIB, memory_age_s=12.0, store_nbytes=2 * GIB, store_age_s=None, found=1, mended=1,
            damaged=[],
        ),
        "histograms": [
            Histogram(what="staged", bounds=[0.5, 1.0], counts=[0, 2, 1], total=4.5),
            Histogram(what="stall", bounds=[0.5, 1.0], counts=[3, 0, 0], total=0.3),
            Histogram(what="drain_bytes_per_s", bounds=[1e9], counts=[0, 1], total=1.25 * GIB),
            Histogram(what="restore", tier="arena", bounds=[0.5, 1.0], counts=[1, 0, 0], total=0.2),
        ],
    }  # fmt: skip
    return JobStatus(**values | changes)


NOTHING: dict[str, Any] = {
    "ranks": [], "checkpoints": [], "drain": None, "errors": [], "ends": {}, "pace": None, "histograms": [],
    "goodput": None, "totals": None,
    "scrub": None,
}  # fmt: skip


def status(**changes: Any) -> Status:
    values = {
        "schema": SCHEMA, "version": "0.1.0", "node": "node03", "pid": 4242, "arena": "/dev/shm/ckptd-1000",
        "uptime_s": 11520.0, "budget_nbytes": 1200 * GIB, "used_nbytes": 768 * GIB, "refused_messages": 1, "errors": [],
        "long_turns": 3, "longest_turn_s": 0.25, "began_at": 1.7e9,
        "tightest_limit": "memory.max of cgroup /sys/fs/cgroup/system.slice/slurmstepd.scope/job_1234567/step_0/user",
        "jobs": [job(), job(job="tiny", store="/s", world_size=1, **NOTHING)],
        "workers": [WorkerStatus(store="/s", pid=77, busy=1, idle_s=0.0, problem="no answer for 40 s")],
    }  # fmt: skip
    return msgspec.structs.replace(Status(**values), **changes)
