"""`ckptd doctor`: is this machine fit for ckptd, and what to type if not. Runs the probes, then the rules."""

import os
import platform

from ckptd import __version__
from ckptd.arena import budget
from ckptd.arena.ask import Daemon, require_daemon
from ckptd.doctor import needless, probe, rules
from ckptd.doctor.clocks import judge_clocks
from ckptd.doctor.probe_store import probe_store
from ckptd.doctor.rules import Finding, Verdict, judge_daemon, judge_peers
from ckptd.shared.base.errors import CkptdError
from ckptd.shared.format.arena_paths import SOCKET
from ckptd.shared.protocol.status import Status

__all__ = ["Finding", "Verdict", "examine"]

_STATUS_S = 5.0


def examine(arena_dir: str, store: str | None = None, *, deadline_s: float = 20.0) -> list[Finding]:
    """Every finding about machine, arena and store, in reading order. deadline_s bounds the store's part."""
    status, error = _ask(arena_dir)
    facts = probe_store(store, deadline_s=deadline_s) if store else None
    return [
        *examine_memory(arena_dir),
        *examine_arena(arena_dir),
        *rules.judge_store(facts, sorted({job.store for job in status.jobs} if status is not None else ())),
        judge_daemon(status, error, __version__),
        *(judge_peers(status) if status is not None else []),
        *judge_clocks(facts.ahead_s if facts is not None else None, status),
        *needless.examine(status, probe.user_name()),
        *examine_machine(),
    ]


def _ask(arena_dir: str) -> tuple[Status | None, CkptdError | None]:
    """Findings about the arena's daemon and its peers; without one, the reason."""
    try:
        require_daemon(arena_dir)
    except CkptdError:
        return None, None
    try:
        with Daemon(arena_dir, _STATUS_S) as daemon:
            return daemon.status(nodes=True), None
    except CkptdError as error:
        return None, error


def examine_memory(arena_dir: str) -> list[Finding]:
    """How much the arena may hold, and how fast and how safe that memory is."""
    mount = probe.mount_holding(arena_dir)
    meminfo = probe.meminfo()
    return [
        rules.judge_shm(mount, probe.file_system_nbytes(arena_dir), meminfo.get("MemTotal", 0)),
        rules.judge_budget(budget.budget(arena_dir)),
        rules.judge_cgroup(budget.cgroup_limits()),
        rules.judge_huge_pages(mount, probe.read_text("/sys/kernel/mm/transparent_hugepage/shmem_enabled")),
        rules.judge_populate(probe.populate_works(), platform.release()),
        rules.judge_memlock(*probe.memlock_limits(), meminfo.get("SwapTotal", 0)),
    ]


def examine_arena(arena_dir: str) -> list[Finding]:
    """Whether the arena is ours, reachable and safe from logind."""
    return [
        rules.judge_arena(probe.arena_facts(arena_dir)),
        rules.judge_socket_path(os.path.join(arena_dir, SOCKET)),
        examine_remove_ipc(arena_dir),
    ]


def examine_remove_ipc(arena_dir: str) -> Finding:
    """Whether this user's logout wipes the arena. The daemon asks too, to warn ranks that attach."""
    user = probe.user_name()
    return rules.judge_remove_ipc(
        arena=os.path.realpath(arena_dir),
        logind=probe.has_logind(),
        removes=rules.removes_ipc(probe.logind_texts()),
        lingers=probe.lingers(user),
        uid=os.getuid(),
        user=user,
    )


def examine_machine() -> list[Finding]:
    """Processors, descriptors and versions."""
    return [
        rules.judge_files(*probe.file_limits()),
        rules.judge_cpus(len(os.sched_getaffinity(0))),
        rules.judge_versions(probe.versions()),
    ]
