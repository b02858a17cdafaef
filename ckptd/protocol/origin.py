"""Which checkpoint a trainer's directory has its files from: the content of a small file there, the marker."""

from typing import Self

import msgspec

from ckptd.protocol.ids import JobKey, SaveId, parse_dirname

MARKER = ".ckptd"


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the marker. The checkpoint may be one that is still to be committed."""

    store: str
    job: str
    checkpoint: str  # its directory's name
    save_id: str
    files: list[str] = []  # that a daemon published there; whatever else lies there is somebody's

    @classmethod
    def of(cls, job: JobKey, save: SaveId) -> Self:
        """Of a save of this job."""
        return cls(store=job.store, job=job.job, checkpoint=save.dirname, save_id=save.text)

    @property
    def path(self) -> str:
        """The checkpoint's own directory."""
        return f"{self.store}/{self.job}/{self.checkpoint}"

    @property
    def step(self) -> int:
        """Its step, -1 for a name that is none of ours."""
        parsed = parse_dirname(self.checkpoint)
        return parsed[0] if parsed is not None else -1
