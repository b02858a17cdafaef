"""Facts that a running daemon and its peers report -> findings of `ckptd doctor`. Pure, like ckptd.doctor.rules."""

from collections.abc import Sequence

from ckptd.doctor.rules import Finding, Verdict
from ckptd.shared.base.errors import CkptdError
from ckptd.shared.protocol.status import JobStatus, Status

_FEW = 4
_SAME = "install the same ckptd there and restart its daemon (ckptd stop --wait): what is staged stays"


def judge_daemon(status: Status | None, error: CkptdError | None, version: str) -> Finding:
    """The daemon of the arena, if one runs. version: of this command."""
    name = "daemon"
    if error is not None:
        return Finding(name, Verdict.BAD, error.message, error.hint or "ckptd stop, then start it again")
    if status is None:
        return Finding(name, Verdict.OK, "none runs on this arena; connect starts one, or ckptd run")
    if status.version != version:
        detail = f"version {status.version} runs (pid {status.pid}), this command is {version}"
        return Finding(name, Verdict.WARN, detail, "restart it when it suits (ckptd stop --wait): what is staged stays")
    if status.errors:
        more = f", and {len(status.errors) - 1} more" if len(status.errors) > 1 else ""
        return Finding(name, Verdict.WARN, f"{status.errors[0]}{more}", "ckptd status --nodes shows all")
    return Finding(name, Verdict.OK, f"version {status.version} runs, pid {status.pid}")


def judge_peers(status: Status) -> list[Finding]:
    """The daemons of each job's other nodes, as they just answered. Nothing for jobs on one node."""
    return [_judge_job(job, status) for job in status.jobs if len(job.nodes) > 1]


def _judge_job(job: JobStatus, status: Status) -> Finding:
    name = f"peers of {job.job}"
    away = [node.node for node in job.nodes if not node.reachable and node.node != status.node]
    if away:
        why = next((error for error in status.errors if f"node {away[0]} " in error), "")
        detail = f"not heard of: {_named(away)}{f' ({why})' if why else ''}"
        return Finding(name, Verdict.BAD, detail, "ckptd doctor on that node; are its ports open to this one?")
    if job.silent:
        detail = f"did not answer in time: {_named(job.silent)}"
        return Finding(name, Verdict.WARN, detail, "ckptd status on that node: is its daemon stopped, or very busy?")
    others: dict[str, list[str]] = {}
    for node in job.nodes:
        if node.report is not None and node.report.version != status.version:
            others.setdefault(node.report.version, []).append(node.node)
    if others:
        told = "; ".join(f"version {version} on {_named(nodes)}" for version, nodes in sorted(others.items()))
        return Finding(name, Verdict.WARN, f"{told}; here {status.version}", _SAME)
    return Finding(name, Verdict.OK, f"{len(job.nodes) - 1} answer, all of version {status.version}")


def _named(nodes: Sequence[str]) -> str:
    more = f" and {len(nodes) - _FEW:,} more" if len(nodes) > _FEW else ""
    return ", ".join(nodes[:_FEW]) + more
