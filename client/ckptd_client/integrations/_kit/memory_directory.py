"""A checkpoint's files where a framework's own loader can open them, without a disk.

Frameworks load from a directory. This one has links to files in memory that have no other name: when the process that
holds them ends, however it ends, they are gone, and what is left are links to nothing in a temporary directory. The
ranks of a node share one.
"""

import json
import os
import shutil
import tempfile

from ckptd.shared.base.errors import CkptdError, RestoreError
from ckptd.shared.protocol.messages import Tier
from ckptd_client._load.files import RestoredFiles
from ckptd_client._local.rank import Group

_BOOT_ID = "/proc/sys/kernel/random/boot_id"


class MemoryDirectory:
    """The files of a checkpoint, below ``path``; without those of ranks elsewhere that are not rank 0.

    at: where the caller looks for the checkpoint. Where it can only be read from the store and is published there, and
    nowhere else, that directory itself; not so with a key, since nothing proves what is read there. Collective: all
    ranks of the group make it, of the same checkpoint, and close it when all have loaded. Raises RestoreError, on all
    ranks, when a file is damaged or memory is short.
    """

    def __init__(self, files: RestoredFiles, group: Group, at: str = "") -> None:
        self.path = ""
        self._own = ""
        self._descriptors: list[int] = []
        homes = _texts(group, _home())
        here = [rank for rank, home in enumerate(homes) if home == homes[group.rank]]
        path = fault = ""
        if group.rank == here[0]:
            try:
                path = self._make(files, {0, *here}, at)
            except (CkptdError, OSError) as error:
                fault = str(error)
        answers = [json.loads(word) if word else ("", "") for word in _texts(group, json.dumps((path, fault)))]
        faults = [fault for _, fault in answers if fault]
        if faults:
            self.close()
            raise RestoreError(f"step {files.step} cannot be read: {faults[0]}", hint="resume from an older directory")
        self.path = answers[here[0]][0]

    def _make(self, files: RestoredFiles, ranks: set[int], at: str) -> str:
        if not files.is_keyed and _lies_at(files, at):
            return at
        self._own = tempfile.mkdtemp(prefix="ckptd-load-")
        for name in files.names:
            if files.rank_of(name) in ranks:
                path = os.path.join(self._own, name)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                self._descriptors.append(files.memory_file(name))
                os.symlink(f"/proc/{os.getpid()}/fd/{self._descriptors[-1]}", path)
        return self._own

    def close(self) -> None:
        """Gives the memory back. To be called when no rank of this node reads any more. Idempotent."""
        while self._descriptors:
            os.close(self._descriptors.pop())
        if self._own:
            shutil.rmtree(self._own, ignore_errors=True)
            self._own = ""


def _lies_at(files: RestoredFiles, at: str) -> bool:
    return files.tier == Tier.PFS and files.directory == at and files.is_published and os.path.isdir(at)


def _home() -> str:
    """What is the same for processes that see each other's files and descriptors."""
    with open(_BOOT_ID, encoding="ascii") as file:
        boot = file.read().strip()
    spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "mnt", "user")]
    return f"{boot} {spaces} {os.getuid()}"


def _texts(group: Group, word: str) -> list[str]:
    """The text of every rank. A rank that cannot exchange texts has its own alone."""
    if group.exchange is None:
        return [word if rank == group.rank else "" for rank in range(group.world_size)]
    return [text.decode() for text in group.exchange(word.encode())]
