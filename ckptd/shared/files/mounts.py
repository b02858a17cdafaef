"""What /proc/self/mountinfo says: which file system holds a path, and with which options."""

import re

import msgspec

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where containers have it, too
_ESCAPE_RE = re.compile(r"\\([0-7]{3})")


class Mount(msgspec.Struct, frozen=True):
    """One mounted file system. root is the directory of that file system which appears at point."""

    root: str
    point: str
    fs_type: str
    options: tuple[str, ...]  # of the mount, then of the file system
    source: str = ""  # the device, or what else is mounted

    def option(self, name: str) -> str | None:
        """Value of the option name=value, "" for a bare name, None when it is not set. The last one wins."""
        found = None
        for option in self.options:
            key, _, value = option.partition("=")
            if key == name:
                found = value
        return found


def parse_mountinfo(text: str) -> list[Mount]:
    """The mounts in the file's order, so that the last of several at one point is the visible one."""
    mounts = []
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        fields, tail = before.split(" "), after.split(" ")
        if not separator or len(fields) < 6 or len(tail) < 3:  # noqa: PLR2004
            continue
        options = (*fields[5].split(","), *tail[2].split(","))
        mounts.append(Mount(_unescape(fields[3]), _unescape(fields[4]), tail[0], options, _unescape(tail[1])))
    return mounts


def _unescape(path: str) -> str:
    """The kernel writes space, tab, newline and backslash as three octal digits."""
    return _ESCAPE_RE.sub(lambda match: chr(int(match[1], 8)), path)


def relative_to(path: str, directory: str) -> str | None:
    """Rest of path below directory, no leading slash; "" when they are equal, None when path is outside of it."""
    if path == directory:
        return ""
    prefix = directory.rstrip("/") + "/"
    return path[len(prefix) :] if path.startswith(prefix) else None


def mount_of(path: str, mounts: list[Mount]) -> Mount | None:
    """The mount that holds path, which must be absolute and free of symlinks."""
    best = None
    for mount in mounts:
        if relative_to(path, mount.point) is not None and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best
