"""``python -m tests.security.cell SPEC``: commands run as an ordinary user, and what their processes wrote.

In a mount namespace of its own every file system is read-only, and what everybody may write to (/tmp, /dev/shm, ...) is
empty and fresh: so all that is written anywhere is found there. What must be reachable for any user (the interpreter,
its packages, this tree) is, even from below a directory that is closed to others, such as root's home.
"""

import ctypes
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from typing import Any

from tests.cluster import CODE, ROOT

OPEN_TO_ALL = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/var/lock", "/mnt")
HOME, STORE, WORK = "/tmp/home", "/tmp/ckpt", "/tmp/work"
_LIBC = ctypes.CDLL(None, use_errno=True)
_NEWNS, _RDONLY, _REMOUNT, _BIND, _REC, _PRIVATE = 0x20000, 0x1, 0x20, 0x1000, 0x4000, 0x40000
_KEPT_FLAGS = {os.ST_NOSUID: 0x2, os.ST_NODEV: 0x4, os.ST_NOEXEC: 0x8, os.ST_NOATIME: 0x400, os.ST_RELATIME: 0x200000}
_NO_FILES = frozenset(
    {"proc", "sysfs", "cgroup", "cgroup2", "devpts", "mqueue", "securityfs", "debugfs", "tracefs", "bpf"}
)
_LEAVES_S = 20.0  # a daemon that a client started goes three seconds after its last job


def _mount(source: str, target: str, kind: str, flags: int, words: str = "") -> None:
    done = _LIBC.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), words.encode())
    if done:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), target)


def _needed() -> list[str]:
    paths = {ROOT, sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable))}
    return sorted(os.path.realpath(path) for path in paths | {p for p in sys.path if os.path.isdir(p)})


def _wall_in() -> list[str]:
    """The namespace is made; returns the directories that are fresh."""
    if _LIBC.unshare(_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    _mount("none", "/", "", _REC | _PRIVATE)
    needed = {path: os.open(path, os.O_PATH) for path in _needed()}
    fresh = [path for path in OPEN_TO_ALL if os.path.isdir(path) and not os.path.islink(path)]
    for path in fresh:
        _mount("tmpfs", path, "tmpfs", 0, "mode=1777")
    walls = list(fresh)
    for path, fd in needed.items():
        walls += _open_way(path)
        if not os.path.exists(path):
            os.makedirs(path)
            _mount(f"/proc/self/fd/{fd}", path, "", _BIND | _REC)
    with open("/proc/self/mountinfo") as file:
        mounts = [line.split() for line in file]
    for words in mounts:
        where, kind = words[4].encode().decode("unicode_escape"), words[words.index("-") + 1]
        if where not in fresh and kind not in _NO_FILES:
            _read_only(where)
    return fresh


def _open_way(path: str) -> list[str]:
    """An empty directory that anybody may pass in place of each one above the path that others may not."""
    walls = []
    above = ""
    for name in path.strip("/").split("/"):
        above += f"/{name}"
        if os.path.isdir(above) and not stat.S_IMODE(os.stat(above).st_mode) & 0o001:
            _mount("tmpfs", above, "tmpfs", 0, "mode=755")
            walls.append(above)
    return walls


def _read_only(where: str) -> None:
    try:
        found = os.statvfs(where).f_flag
        kept = sum(flag for bit, flag in _KEPT_FLAGS.items() if found & bit)
        _mount("none", where, "", _REMOUNT | _BIND | _RDONLY | kept)
    except FileNotFoundError:
        pass  # below something fresh


class _Eyes(threading.Thread):
    """Looks all the time for what the user owns in the fresh directories; ``seen``: path to kind and mode.

    Not in what is needed: that is read-only.
    """

    def __init__(self, places: list[str], uid: int) -> None:
        super().__init__(daemon=True)
        self._places, self._uid = places, uid
        self._needed = set(_needed())
        self.seen: dict[str, str] = {}
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.05):
            self.look()

    def look(self) -> None:
        for place in self._places:
            for directory, folders, names in os.walk(place):
                folders[:] = [name for name in folders if os.path.join(directory, name) not in self._needed]
                for name in (*folders, *names):
                    path = os.path.join(directory, name)
                    try:
                        found = os.lstat(path)
                    except FileNotFoundError:
                        continue
                    if found.st_uid == self._uid:
                        self.seen[path] = stat.filemode(found.st_mode)


def _processes_of(uid: int) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == uid:
                found.append(int(name))
        except FileNotFoundError:
            continue
    return found


def live(spec: dict[str, Any]) -> dict[str, Any]:
    """Runs the commands one after the other; spec: uid, home_mode, umask, files (name: text, in WORK), commands."""
    uid, fresh = spec["uid"], _wall_in()
    for path, mode, owner in ((HOME, spec["home_mode"], uid), (WORK, 0o1777, 0)):
        os.mkdir(path)
        os.chmod(path, mode)
        os.chown(path, owner, owner)
    for name, text in spec["files"].items():
        with open(os.path.join(WORK, name), "w") as file:
            file.write(text)
    eyes = _Eyes(fresh, uid)
    eyes.start()
    environ = {"HOME": HOME, "PATH": f"{sys.prefix}/bin:/usr/bin:/bin", "PYTHONPATH": CODE, "OMP_NUM_THREADS": "1"}
    done = [_as_user(uid, command, environ, spec["umask"]) for command in spec["commands"]]
    deadline = time.monotonic() + _LEAVES_S
    while (left := _processes_of(uid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    eyes.over.set()
    eyes.join()
    eyes.look()
    there = sorted(path for path in eyes.seen if os.path.lexists(path))
    return {"done": done, "wrote": eyes.seen, "there": there, "left": left}


def _as_user(uid: int, command: list[str], environ: dict[str, str], umask: int) -> tuple[int, str]:
    done = subprocess.run(
        command, user=uid, group=uid, extra_groups=[], umask=umask, env=environ, cwd=WORK, check=False,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
    )  # fmt: skip
    return done.returncode, done.stdout


if __name__ == "__main__":
    print(json.dumps(live(json.loads(sys.argv[1]))))
