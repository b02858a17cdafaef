"""How much memory the arena may take before the kernel says no with SIGBUS or the OOM killer.

The least of: free bytes of the tmpfs, headroom of every cgroup above this process, MemAvailable. Each keeps a margin
back, because the trainer runs under the same limits. root is the directory that /proc and /sys are looked up under.
"""

import os

import msgspec

from ckptd.shared.files.mounts import SHARED_MEMORY, Mount, mount_of, parse_mountinfo, relative_to
from ckptd.system.config import default_arena

_UNLIMITED = 1 << 60  # version 1 writes "no limit" as the largest page-aligned number
_TMPFS_MARGIN = 1 / 64
_RAM_MARGIN = 1 / 16
_MIN_MARGIN_NBYTES = 4 << 20


class Limit(msgspec.Struct, frozen=True):
    """One bound on the arena. nbytes_free is what ckptd may still take: the margin is already kept back."""

    name: str
    nbytes_free: int
    how_to_raise: str


class Budget(msgspec.Struct, frozen=True):
    """Bytes that may be added to the arena now, and every limit that was looked at, tightest first."""

    nbytes: int
    limits: tuple[Limit, ...]

    @property
    def tightest(self) -> Limit:
        """The limit to raise first."""
        return self.limits[0]


class CgroupLevel(msgspec.Struct, frozen=True):
    """The directory of one cgroup above this process, under version 1 or 2."""

    directory: str
    version: int


def budget(arena_dir: str, *, root: str = "/") -> Budget:
    """What may still be added to an arena in arena_dir, which need not exist yet."""
    mounts = parse_mountinfo(_read(root, "/proc/self/mountinfo"))
    limits = [
        *_tmpfs_limits(existing_parent(arena_dir), mounts),
        *cgroup_limits(root),
        *meminfo_limits(_read(root, "/proc/meminfo")),
    ]
    limits.sort(key=lambda limit: limit.nbytes_free)
    return Budget(limits[0].nbytes_free if limits else 0, tuple(limits))


def existing_parent(path: str) -> str:
    """path, or its nearest ancestor that exists, without symlinks."""
    path = os.path.realpath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def cgroup_limits(root: str = "/") -> list[Limit]:
    """A limit for every cgroup above this process that has one."""
    mounts = parse_mountinfo(_read(root, "/proc/self/mountinfo"))
    limits = []
    for level in cgroup_levels(_read(root, "/proc/self/cgroup"), mounts):
        limit = _limit_of_level(root, level)
        if limit is not None:
            limits.append(limit)
    return limits


# --- pure: text and numbers in, limits out ---


def cgroup_levels(memberships: str, mounts: list[Mount]) -> list[CgroupLevel]:
    """Every visible cgroup above the process, itself first, from /proc/self/cgroup and the mounts.

    On a hybrid machine the memory controller is in one of the two versions; the other's directories have no such files.
    """
    levels = []
    for line in memberships.splitlines():
        _, controllers, path = line.split(":", 2)
        version = 2 if controllers == "" else 1
        if version == 1 and "memory" not in controllers.split(","):
            continue
        mount = _cgroup_mount(mounts, version)
        if mount is not None:
            levels += [CgroupLevel(directory, version) for directory in _upwards(mount, path)]
    return levels


def _cgroup_mount(mounts: list[Mount], version: int) -> Mount | None:
    for mount in mounts:
        if mount.fs_type == "cgroup2" if version == 2 else mount.fs_type == "cgroup" and "memory" in mount.options:  # noqa: PLR2004
            return mount
    return None


def _upwards(mount: Mount, path: str) -> list[str]:
    """Directories from the process's cgroup up to the mount's own.

    In a container the mount's root is often the container's cgroup, or /proc names a path that the mount does not show:
    then the mount itself is the lowest cgroup that can be read.
    """
    below = relative_to(path, mount.root)
    parts = [part for part in (below or "").split("/") if part]
    if ".." in parts:
        parts = []
    return ["/".join([mount.point.rstrip("/"), *parts[:depth]]) for depth in range(len(parts), -1, -1)]


def parse_cgroup_number(text: str) -> int | None:
    """Bytes in a file such as memory.max, None for no limit or an absent file."""
    text = text.strip()
    if not text.isdigit() or int(text) >= _UNLIMITED:
        return None
    return int(text)


def parse_fields(text: str) -> dict[str, int]:
    """Numbers by name, of memory.stat ("name 1"), meminfo or status ("Name: 1 kB", in bytes)."""
    fields = {}
    for line in text.splitlines():
        words = line.replace(":", " ").split()
        if len(words) > 1 and words[1].isdigit():
            fields[words[0]] = int(words[1]) * (1024 if words[2:] == ["kB"] else 1)
    return fields


def cgroup_free_nbytes(limit_nbytes: int, usage_nbytes: int, stat: str) -> int:
    """Bytes left below a cgroup's limit. Inactive file cache is dropped before anything is killed: it counts."""
    fields = parse_fields(stat)
    reclaimable = fields.get("total_inactive_file", fields.get("inactive_file", 0))
    return max(0, limit_nbytes - max(0, usage_nbytes - reclaimable))


def meminfo_limits(meminfo: str) -> list[Limit]:
    """The machine's own memory."""
    available = parse_fields(meminfo).get("MemAvailable")
    if available is None:
        return []
    advice = "free memory on this node, lower slots_per_rank, or use more nodes"
    return [Limit("MemAvailable of /proc/meminfo", _less_margin(available, _RAM_MARGIN), advice)]


def tmpfs_limit(mount_point: str, free_nbytes: int) -> Limit:
    """The tmpfs that holds the arena."""
    advice = f"as root: mount -o remount,size=75% {mount_point}; "
    if mount_point == SHARED_MEMORY:
        advice += "Docker: docker run --shm-size=64g; Kubernetes: an emptyDir with medium: Memory at /dev/shm; "
        advice += "without these: CKPTD_SLOTS_PER_RANK=2, or more nodes"
    else:
        advice += f"without root: another tmpfs with room, such as CKPTD_ARENA={default_arena()}"
    return Limit(f"free bytes of {mount_point}", _less_margin(free_nbytes, _TMPFS_MARGIN), advice)


def how_to_raise_cgroup(level: CgroupLevel, file: str) -> str:
    """The setting through which the creator of this cgroup raises it."""
    leaf = os.path.basename(level.directory)
    if "slurm" in level.directory:
        return "ask Slurm for more: #SBATCH --mem=0 (all of the node) or --mem=<size>"
    if "kubepods" in level.directory:
        return "raise resources.limits.memory of the pod"
    if "docker" in level.directory or "libpod" in level.directory:
        return "docker run --memory=<size>"
    if leaf.endswith((".service", ".scope", ".slice")):
        setting = "MemoryHigh" if file == "memory.high" else "MemoryMax"
        return f"systemctl set-property {leaf} {setting}=<size>  (or {setting}= in the unit)"
    return f"raise {level.directory}/{file}  (docker run --memory=<size>, or the pod's resources.limits.memory)"


def _less_margin(nbytes: int, margin: float) -> int:
    return max(0, nbytes - max(_MIN_MARGIN_NBYTES, int(nbytes * margin)))


# --- edge: files ---


def _read(root: str, path: str) -> str:
    """Text of root/path, "" where there is no such file: a missing file is a missing limit."""
    try:
        with open(os.path.join(root, path.lstrip("/")), encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _limit_of_level(root: str, level: CgroupLevel) -> Limit | None:
    """The tighter of a cgroup's limits: above memory.high everything in it is throttled, training too."""
    names = ("memory.max", "memory.high") if level.version == 2 else ("memory.limit_in_bytes",)  # noqa: PLR2004
    usage_name = "memory.current" if level.version == 2 else "memory.usage_in_bytes"  # noqa: PLR2004
    found = [(nbytes, name) for name in names if (nbytes := _number(root, level, name)) is not None]
    usage = _number(root, level, usage_name)
    if not found or usage is None:
        return None
    nbytes, name = min(found)
    free = cgroup_free_nbytes(nbytes, usage, _read(root, f"{level.directory}/memory.stat"))
    return Limit(
        f"{name} of cgroup {level.directory}", _less_margin(free, _RAM_MARGIN), how_to_raise_cgroup(level, name)
    )


def _number(root: str, level: CgroupLevel, name: str) -> int | None:
    return parse_cgroup_number(_read(root, f"{level.directory}/{name}"))


def _tmpfs_limits(directory: str, mounts: list[Mount]) -> list[Limit]:
    """The file system's free bytes; nothing for a tmpfs mounted with size=0, which has no bound of its own."""
    stat = os.statvfs(directory)
    if stat.f_blocks == 0:
        return []
    mount = mount_of(directory, mounts)
    return [tmpfs_limit(mount.point if mount else directory, stat.f_bavail * stat.f_frsize)]
