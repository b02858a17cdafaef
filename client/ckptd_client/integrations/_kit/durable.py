"""Whether the very save that a directory was promised is committed: what links are made of, and nothing else."""

import os
from dataclasses import dataclass
from typing import Self

from ckptd.shared.base.errors import UsageError
from ckptd.shared.files.regular import RegularFiles
from ckptd.shared.format.committed import identify
from ckptd.shared.format.integrity import Integrity
from ckptd.shared.format.manifest import COMMITTED, Committed
from ckptd.shared.format.origin import Origin
from ckptd_client.client import Client, staging_of


@dataclass(frozen=True, slots=True)
class Durable:
    """A committed checkpoint that is the one that was promised: of this job, this run, this save.

    Its name does not say so. Two runs of a job that was started over may have given it, and a step may be saved again.
    """

    origin: Origin
    committed: Committed

    def __post_init__(self) -> None:
        if (self.committed.job, self.committed.save) != (self.origin.job, self.origin.save):
            text = f"{self.origin.path} holds {self.committed.save_id}, not {self.origin.save_id}, which was promised"
            raise UsageError(text, hint=f"ckptd list {os.path.dirname(self.origin.path)}")

    @classmethod
    def find(cls, origin: Origin, integrity: Integrity) -> Self | None:
        """None where it is not committed, or another one's lies there. Raises DamagedError, UsageError, OSError.

        IntegrityError, a DamagedError, for one that is proved in another way.
        """
        try:
            os.stat(os.path.join(origin.path, COMMITTED))
        except (FileNotFoundError, NotADirectoryError):
            return None
        committed = identify(origin.path, RegularFiles(integrity), job=origin.job)
        return cls(origin, committed) if committed.save == origin.save else None


def durable(client: Client, origin: Origin) -> Durable | None:
    """As Durable.find, proved as the client has it; None too for another job's: its files get no other names."""
    return Durable.find(origin, staging_of(client).integrity) if is_of(client, origin) else None


def is_of(client: Client, origin: Origin) -> bool:
    """Whether it names a checkpoint of the client's job."""
    return origin.is_of(staging_of(client).job)
