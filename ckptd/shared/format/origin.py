"""Which checkpoint a trainer's directory has its files from: the content of a small file there, the marker."""

from typing import Annotated, Self

import msgspec

from ckptd.shared.base.ids import JobKey, JobName, SaveId, StoreUrl, parse_save

MARKER = ".ckptd"
_CheckpointName = Annotated[str, msgspec.Meta(pattern=r"^step-[0-9]{9,12}\.i[0-9]{4,8}\Z")]


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the marker. The checkpoint may be one that is still to be committed.

    Anybody with access to the directory can write this. It may name a checkpoint that is read; nothing is written or
    removed there, and no file of it gets a second name but for a session of the very job.
    """

    store: StoreUrl
    job: JobName
    checkpoint: _CheckpointName  # its directory's name
    save_id: str
    files: list[str] = []  # that a daemon published there; other files have other owners

    @classmethod
    def of(cls, job: JobKey, save: SaveId) -> Self:
        """Of a save of this job."""
        return cls(store=job.store, job=job.job, checkpoint=save.dirname, save_id=save.text)

    def is_of(self, job: JobKey) -> bool:
        """Whether it names a checkpoint of this job."""
        return (self.store, self.job) == (job.store, job.job)

    @property
    def path(self) -> str:
        """The checkpoint's own directory."""
        return f"{self.store}/{self.job}/{self.checkpoint}"

    @property
    def is_sound(self) -> bool:
        """Whether its save is one, and the checkpoint's name is that of the save."""
        save = parse_save(self.save_id)
        return save is not None and save.dirname == self.checkpoint

    @property
    def save(self) -> SaveId:
        """Of a sound one. It alone says which run: two may have given the checkpoint's name."""
        save = parse_save(self.save_id)
        assert save is not None  # noqa: S101 - it is sound
        return save
