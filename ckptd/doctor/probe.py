"""Reads the facts about this machine for ckptd.doctor.rules. Every path may be absent. Touches no store."""

import contextlib
import glob
import importlib.metadata
import mmap
import os
import platform
import pwd
import resource

import zmq

from ckptd.arena.budget import existing_parent, parse_fields
from ckptd.doctor.rules import ArenaFacts
from ckptd.shared.files.mounts import Mount, mount_of, parse_mountinfo

_MADV_POPULATE_WRITE = 23  # <linux/mman.h>; mmap has no name for it before Python 3.14
_LOGIND_DIRECTORIES = ("/usr/lib/systemd", "/usr/local/lib/systemd", "/run/systemd", "/etc/systemd")


def read_text(path: str) -> str:
    """Text of path, "" when it cannot be read."""
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
    return ""


def mount_holding(path: str) -> Mount | None:
    """The mount that holds path, or will when it is created."""
    return mount_of(existing_parent(path), parse_mountinfo(read_text("/proc/self/mountinfo")))


def file_system_nbytes(path: str) -> int:
    """Size of the file system that holds path; 0 for a tmpfs without a limit."""
    stat = os.statvfs(existing_parent(path))
    return stat.f_blocks * stat.f_frsize


def meminfo() -> dict[str, int]:
    """/proc/meminfo in bytes."""
    return parse_fields(read_text("/proc/meminfo"))


def memlock_limits() -> tuple[int | None, int | None]:
    """Soft and hard RLIMIT_MEMLOCK, None for unlimited."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = resource.RLIM_INFINITY
    return None if soft == unlimited else soft, None if hard == unlimited else hard


def file_limits() -> tuple[int, int]:
    """Soft and hard RLIMIT_NOFILE."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def populate_works() -> bool:
    """Whether MADV_POPULATE_WRITE is there, by trying it on one page."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            page.madvise(_MADV_POPULATE_WRITE)
        except OSError:
            return False
    return True


def has_logind() -> bool:
    """Whether a logind runs that could remove anything."""
    return os.path.isdir("/run/systemd/users") or os.path.isdir("/run/systemd/seats")


def logind_texts(root: str = "/") -> list[str]:
    """logind.conf and its drop-ins in the order they apply: later wins, and /etc hides a file of the same name."""
    directories = [os.path.join(root, directory.lstrip("/")) for directory in _LOGIND_DIRECTORIES]
    drop_ins: dict[str, str] = {}
    for directory in directories:
        for path in glob.glob(os.path.join(directory, "logind.conf.d", "*.conf")):
            drop_ins[os.path.basename(path)] = path
    main = [path for directory in directories if os.path.exists(path := os.path.join(directory, "logind.conf"))]
    return [read_text(path) for path in (*main[-1:], *(drop_ins[name] for name in sorted(drop_ins)))]


def user_name() -> str:
    """Our user's name, or its number where it has none, as in many containers."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def lingers(user: str) -> bool:
    """Whether logind keeps user's manager after the last logout."""
    return os.path.exists(f"/var/lib/systemd/linger/{user}")


def arena_facts(path: str) -> ArenaFacts:
    """The arena's directory entry; a symlink is not followed."""
    try:
        found = os.lstat(path)
    except OSError:
        parent = existing_parent(path)
        return ArenaFacts(path=path, uid=os.getuid(), parent_writable=os.access(parent, os.W_OK | os.X_OK))
    return ArenaFacts(path=path, uid=os.getuid(), exists=True, owner=found.st_uid, mode=found.st_mode)


def versions() -> dict[str, str | None]:
    """Versions of what ckptd runs on. Nothing heavy is imported to find them."""
    return {
        "Python": platform.python_version(),
        "torch": _distribution_version("torch"),
        "pyzmq": _distribution_version("pyzmq"),
        "libzmq": zmq.zmq_version(),
        "msgspec": _distribution_version("msgspec"),
        "Linux": platform.release(),
    }


def _distribution_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
