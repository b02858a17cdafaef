"""Facts about this machine -> findings of `ckptd doctor`. Pure: every threshold and every piece of advice is here."""

import enum
import os
import stat
from collections.abc import Sequence

import msgspec

from ckptd.arena.budget import Budget, Limit
from ckptd.shared.base.errors import CkptdError
from ckptd.shared.files.mounts import Mount
from ckptd.shared.protocol.status import JobStatus, Status
from ckptd.system.units import format_size

GIB = 1 << 30
SOCKET_PATH_MAX = 107  # bytes of sun_path, without the final zero
_SMALL_SHM_SHARE = 0.25
_SMALL_BUDGET_NBYTES = 1 * GIB
_UNUSABLE_BUDGET_NBYTES = 64 << 20
_MIN_FILES = 1024
_SYSTEM_UID_MAX = 999
_SLOW_SYNC_S = 0.1
_SLOW_NBYTES_PER_S = 200e6
_LOW_STORE_NBYTES = 50 * GIB
_MEMORY_FS = ("tmpfs", "ramfs")
_QUOTA_COMMANDS = {
    "lustre": "lfs quota -h -u $USER {}",
    "gpfs": "mmlsquota --block-size auto",
    "beegfs": "beegfs-ctl --getquota --uid $USER",
}
_FEW = 4
_SAME = "install the same ckptd there and restart its daemon (ckptd stop --wait): what is staged stays"


class Verdict(enum.StrEnum):
    """How much a finding matters."""

    OK = "ok"
    WARN = "warn"  # works, but slower or with a gap in the promises
    BAD = "bad"  # ckptd will not work, or would lose what it holds


class Finding(msgspec.Struct, frozen=True):
    """One line of the report. fix says what to type; it is empty only when the verdict is ok."""

    name: str
    verdict: Verdict
    detail: str
    fix: str = ""


class ArenaFacts(msgspec.Struct, frozen=True, kw_only=True):
    """lstat of the arena's directory; exists False leaves the rest unset."""

    path: str
    uid: int  # ours
    exists: bool = False
    owner: int = 0
    mode: int = 0
    parent_writable: bool = True


class StoreFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the store's probe saw before it finished or ran out of time. None: it did not get so far."""

    path: str
    doing: str = ""  # the call it was in when it last reported
    finished: bool = False
    error: str = ""  # why it could not continue
    missing: str = ""  # the topmost directory that is not there
    fs_type: str = ""
    on_root: bool = False  # it lies on the file system of "/"
    free_nbytes: int | None = None
    fsync_s: float | None = None
    rename_error: str | None = None  # "" when rename and directory sync work
    direct_error: str | None = None  # "" when O_DIRECT works
    read_error: str | None = None  # "" when what a drain writes can be read as a restore reads it
    sample_nbytes: int = 0
    sample_s: float = 0.0
    ahead_s: float | None = None  # of the clock that dates files


def _ok(name: str, detail: str) -> Finding:
    return Finding(name, Verdict.OK, detail)


def _warn(name: str, detail: str, fix: str) -> Finding:
    return Finding(name, Verdict.WARN, detail, fix)


def _bad(name: str, detail: str, fix: str) -> Finding:
    return Finding(name, Verdict.BAD, detail, fix)


# --- memory ---


def judge_shm(mount: Mount | None, total_nbytes: int, ram_nbytes: int) -> Finding:
    """The file system under the arena: a tmpfs, of a size that fits a training's state."""
    name = "shared memory"
    if mount is None or mount.fs_type not in _MEMORY_FS:
        kind = mount.fs_type if mount else "no file system"
        fix = "mount -t tmpfs -o size=75%,mode=1777 tmpfs /dev/shm, or set CKPTD_ARENA to a directory on tmpfs"
        return _bad(name, f"the arena lies on {kind}, not on tmpfs", fix)
    if total_nbytes == 0:
        return _ok(name, f"{mount.point}: no size limit of its own")
    detail = f"{mount.point}: {format_size(total_nbytes)}, {total_nbytes / ram_nbytes:.0%} of RAM" if ram_nbytes else ""
    if total_nbytes < _SMALL_SHM_SHARE * ram_nbytes:
        fix = f"mount -o remount,size=75% {mount.point} as root, or docker run --shm-size=64g"
        return _warn(name, detail, fix)
    return _ok(name, detail)


def judge_huge_pages(mount: Mount | None, shmem_enabled: str) -> Finding:
    """Whether slots get huge pages. Without them the first touch of a slot is about ten times slower."""
    name = "huge pages"
    value = mount.option("huge") if mount else None
    chosen = next((word.strip("[]") for word in shmem_enabled.split() if word.startswith("[")), "")
    if chosen == "deny":
        return _warn(
            name,
            "the kernel denies them to tmpfs",
            "echo never > /sys/kernel/mm/transparent_hugepage/shmem_enabled, then mount with huge=within_size",
        )
    if chosen == "force" or value in {"always", "within_size", "advise"}:
        return _ok(name, f"tmpfs huge={value or 'never'}, shmem_enabled={chosen}")
    if not chosen:
        return _warn(name, "this kernel has none for tmpfs", "nothing to type: first saves take longer")
    point = mount.point if mount and mount.fs_type in _MEMORY_FS else "/dev/shm"  # noqa: S108  # a mount point, not a temporary file
    return _warn(name, f"{point} is mounted without huge=", f"mount -o remount,huge=within_size {point}  (as root)")


def judge_budget(budget: Budget) -> Finding:
    """Whether the arena may hold anything to speak of, and which limit decides."""
    name = "memory budget"
    if not budget.limits:
        return _warn(name, "no limit could be read", "check that /proc is mounted")
    tightest = budget.tightest
    detail = f"{format_size(budget.nbytes)} may be added; the tightest limit is {tightest.name}"
    if budget.nbytes < _UNUSABLE_BUDGET_NBYTES:
        return _bad(name, detail, tightest.how_to_raise)
    if budget.nbytes < _SMALL_BUDGET_NBYTES:
        return _warn(name, detail, tightest.how_to_raise)
    return _ok(name, detail)


def judge_cgroup(limits: Sequence[Limit]) -> Finding:
    """What the cgroups above this process leave, of either version. Training takes from the same."""
    name = "cgroup"
    if not limits:
        return _ok(name, "no memory limit above this process")
    tightest = min(limits, key=lambda limit: limit.nbytes_free)
    detail = f"{format_size(tightest.nbytes_free)} left below {tightest.name}"
    if tightest.nbytes_free < _SMALL_BUDGET_NBYTES:
        return _warn(name, detail, tightest.how_to_raise)
    return _ok(name, detail)


def judge_memlock(soft_nbytes: int | None, hard_nbytes: int | None, swap_nbytes: int) -> Finding:
    """Whether slots can be kept out of swap, and pinned for GPUs. None: unlimited."""
    name = "locked memory"
    if soft_nbytes is None:
        return _ok(name, "unlimited")
    detail = f"{format_size(soft_nbytes)} may be locked"
    if swap_nbytes == 0:
        return _ok(name, f"{detail}; this machine has no swap, so nothing depends on it")
    if hard_nbytes is None:
        return _warn(name, f"{detail}; slots may be swapped out", "ulimit -l unlimited, where ckptd and training start")
    fix = "LimitMEMLOCK=infinity in the unit, or '* - memlock unlimited' in /etc/security/limits.d/ckptd.conf"
    return _warn(name, f"{detail}; slots may be swapped out", fix)


def judge_files(soft: int, hard: int) -> Finding:
    """Whether slots, ranks and peers have descriptors enough."""
    if soft >= _MIN_FILES:
        return _ok("open files", f"{soft} allowed")
    fix = f"ulimit -n {hard}" if hard >= _MIN_FILES else "LimitNOFILE=65536 in the unit, or nofile in /etc/security"
    return _warn("open files", f"{soft} allowed", fix)


def judge_populate(works: bool, kernel: str) -> Finding:
    """MADV_POPULATE_WRITE, which faults slots in ahead of the first save without touching their bytes."""
    if works:
        return _ok("populate", "MADV_POPULATE_WRITE works")
    return _warn("populate", f"kernel {kernel} lacks MADV_POPULATE_WRITE (Linux 5.14)", "update the kernel")


# --- the user and the arena ---


def removes_ipc(texts: list[str]) -> bool:
    """Whether logind wipes shared memory at logout, from logind.conf and its drop-ins in the order they apply."""
    removes = True
    for text in texts:
        for line in text.splitlines():
            key, _, value = line.partition("=")
            if key.strip() == "RemoveIPC":
                removes = value.strip().lower() not in {"no", "false", "0", "off", "n", "f"}
    return removes


def judge_remove_ipc(  # noqa: PLR0913 - facts
    *, arena: str, logind: bool, removes: bool, lingers: bool, uid: int, user: str
) -> Finding:
    """Whether this user's logout wipes the arena. Root and system users are spared by logind itself."""
    name = "RemoveIPC"
    if not arena.startswith("/dev/shm/"):  # noqa: S108
        return _ok(name, f"logind deletes in /dev/shm only, and the arena is {arena}")
    if not logind:
        return _ok(name, "no logind on this machine")
    if uid <= _SYSTEM_UID_MAX:
        return _ok(name, f"logind spares system users such as {user}")
    if not removes:
        return _ok(name, "switched off in logind.conf")
    if lingers:
        return _ok(name, f"{user} lingers, so logind never sees the last logout")
    return _bad(
        name, f"logind deletes {user}'s shared memory at the last logout", f"sudo loginctl enable-linger {user}"
    )


def judge_arena(facts: ArenaFacts) -> Finding:
    """Whether the arena's directory is ours alone."""
    name = "arena"
    elsewhere = "choose another directory on tmpfs: CKPTD_ARENA=/dev/shm/<name>"
    if not facts.exists:
        if not facts.parent_writable:
            return _bad(name, f"{facts.path} cannot be created", elsewhere)
        return _ok(name, f"{facts.path} does not exist yet")
    if not stat.S_ISDIR(facts.mode):
        return _bad(name, f"{facts.path} is not a directory", f"rm {facts.path}, or {elsewhere}")
    if facts.owner != facts.uid:
        return _bad(name, f"{facts.path} belongs to user {facts.owner}, not to {facts.uid}", elsewhere)
    if facts.mode & 0o077:
        mode = stat.S_IMODE(facts.mode)
        return _bad(name, f"{facts.path} has mode {mode:04o}: others may enter", f"chmod 700 {facts.path}")
    return _ok(name, f"{facts.path} is ours alone")


def judge_socket_path(path: str) -> Finding:
    """Whether the socket's path fits the kernel's limit."""
    nbytes = len(path.encode())
    detail = f"{nbytes} of {SOCKET_PATH_MAX} bytes"
    if nbytes > SOCKET_PATH_MAX:
        return _bad("socket path", detail, "choose a shorter CKPTD_ARENA")
    return _ok("socket path", detail)


def judge_cpus(count: int) -> Finding:
    """Whether the drain has a core of its own."""
    if count > 1:
        return _ok("processors", f"{count} usable")
    fix = "give the job a core that training does not use (Slurm: --cpus-per-task, Docker: --cpus)"
    return _warn("processors", "1 usable: drains will slow training down", fix)


def judge_versions(versions: dict[str, str | None]) -> Finding:
    """What is installed; None is not installed, which matters to nobody but trainers."""
    detail = ", ".join(f"{name} {version or 'not installed'}" for name, version in versions.items())
    return _ok("versions", detail)


# --- the store ---


def judge_store(facts: StoreFacts | None, in_use: Sequence[str] = ()) -> list[Finding]:
    """Everything about the store, as far as the probe came. in_use: stores of the jobs of a daemon that runs."""
    if facts is None:
        named = f"the daemon's jobs have {', '.join(in_use)}" if in_use else "connect(store=...) names it"
        return [_ok("store", f"none given here; {named}. To try one: ckptd doctor --store {next(iter(in_use), 'DIR')}")]
    if facts.error:
        return [_judge_store_error(facts)]
    found = [_judge_store_answers(facts)]
    if facts.free_nbytes is not None:
        found += [_judge_store_kind(facts), judge_store_space(facts.path, facts.fs_type, facts.free_nbytes)]
    if facts.rename_error is not None:
        found.append(_judge_rename(facts.rename_error))
    if facts.fsync_s is not None:
        found.append(judge_sync(facts.fsync_s))
    if facts.direct_error is not None:
        found.append(_judge_direct(facts.direct_error))
    if facts.read_error is not None:
        found.append(_judge_read(facts.read_error))
    if facts.sample_s > 0:
        found.append(judge_speed(facts.sample_nbytes, facts.sample_s))
    return found


def _judge_store_error(facts: StoreFacts) -> Finding:
    """A store that cannot be entered, or one that failed on the way: full, over quota, read-only."""
    if facts.fs_type:
        fix = f"df -h {facts.path}; {_quota_command(facts.path, facts.fs_type)}"
        return _bad("store", f"{facts.error}, when {facts.doing}", fix)
    if facts.missing not in {"", facts.path}:
        fix = f"mount it, or mkdir -p {os.path.dirname(facts.path)} if no mount belongs there"
        return _bad("store", f"{facts.missing} is missing: is it mounted?", fix)
    fix = f"mkdir -p {facts.path} as a user who may, then chown it to the user that trains"
    return _bad("store", f"{facts.path}: {facts.error}", fix)


def _quota_command(path: str, fs_type: str) -> str:
    return _QUOTA_COMMANDS.get(fs_type, "quota -s").format(path)


def _judge_store_answers(facts: StoreFacts) -> Finding:
    if facts.finished and facts.missing:
        return _ok(
            "store", f"{facts.path} is not there yet, connect makes it: {os.path.dirname(facts.path)} is writable"
        )
    if facts.finished:
        return _ok("store", f"{facts.path} is writable")
    fix = f"check the mount: `timeout 10 stat -f {facts.path}`; training goes on without it, nothing becomes durable"
    return _bad("store", f"{facts.path} did not answer in time, in: {facts.doing or 'start'}", fix)


def _judge_store_kind(facts: StoreFacts) -> Finding:
    if facts.fs_type in _MEMORY_FS:
        fix = "set CKPTD_STORE to a directory on the parallel file system"
        return _bad("store file system", f"{facts.fs_type}: lost with the node", fix)
    if facts.on_root:
        fix = "is the parallel file system mounted? Where a disk of the node is meant: keep copies elsewhere"
        return _warn("store file system", f"{facts.fs_type} of /, the node's own disk: lost with the node", fix)
    return _ok("store file system", facts.fs_type or "unknown")


def judge_store_space(path: str, fs_type: str, free_nbytes: int) -> Finding:
    """Free bytes; quotas are not in statvfs, so the command that shows them is named."""
    detail = f"{format_size(free_nbytes)} free (quota: `{_quota_command(path, fs_type)}`)"
    if free_nbytes < _LOW_STORE_NBYTES:
        return _warn("store space", detail, "lower keep_last, or remove older checkpoints")
    return _ok("store space", detail)


def _judge_rename(error: str) -> Finding:
    if not error:
        return _ok("store rename", "rename and directory sync work")
    fix = "choose a POSIX file system: a commit is one rename, made durable by syncing the directory"
    return _bad("store rename", error, fix)


def judge_sync(median_s: float) -> Finding:
    """Latency of a small fsync; a commit takes several in a row."""
    detail = f"{median_s * 1000:.1f} ms for a small file"
    if median_s <= _SLOW_SYNC_S:
        return _ok("store sync", detail)
    return _warn("store sync", detail, "look for load on the file system's metadata servers; commits will be slow")


def _judge_direct(error: str) -> Finding:
    if not error:
        return _ok("store O_DIRECT", "works")
    fix = "nothing to type: drains go through the page cache, slower and with more CPU"
    return _warn("store O_DIRECT", f"refused ({error})", fix)


def _judge_read(error: str) -> Finding:
    if not error:
        return _ok("store read", "what is written is read again")
    fix = "choose another file system: from this one nothing could be restored"
    return _bad("store read", f"written, but not read again ({error})", fix)


def judge_speed(nbytes: int, seconds: float) -> Finding:
    """Speed of a small sample. A real drain has more in flight, so this is a lower bound."""
    detail = f"{nbytes / seconds / 1e6:.0f} MB/s over {format_size(nbytes)}"
    if nbytes / seconds >= _SLOW_NBYTES_PER_S:
        return _ok("store speed", detail)
    return _warn("store speed", detail, "raise the stripe count of the directory (Lustre: lfs setstripe -c -1), or ask")


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
