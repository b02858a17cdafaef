"""The names everything else is keyed by, and the checks a name must pass before it touches a path."""

import re
from typing import Annotated

import msgspec

MAX_JOB_CHARS = 64
MAX_PARTS = 256  # files of one image: a seal names the bytes of each
MAX_STORE_CHARS = 1024
MAX_RANKS = 1 << 20
MAX_STEP = 10**12 - 1
MAX_INCARNATION = 10**8 - 1
MAX_COUNTER = 10**10 - 1

_JOB_PATTERN = rf"^[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_JOB_CHARS - 1}}}\Z"
_STORE_PATTERN = rf"^/[^\x00-\x1f]{{0,{MAX_STORE_CHARS - 1}}}\Z"
_FILE_PATTERN = r"^r[0-9]{5,7}-p[0-9]{2,3}\.(safetensors|bin)\Z"
_NODE_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,254}\Z"
_SESSION_PATTERN = r"^[A-Za-z0-9._:-]{1,128}\Z"

JobName = Annotated[str, msgspec.Meta(pattern=_JOB_PATTERN)]
StorePath = Annotated[str, msgspec.Meta(pattern=_STORE_PATTERN)]
FileName = Annotated[str, msgspec.Meta(pattern=_FILE_PATTERN)]
NodeName = Annotated[str, msgspec.Meta(pattern=_NODE_PATTERN)]
Session = Annotated[str, msgspec.Meta(pattern=_SESSION_PATTERN)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
WorldSize = Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
Step = Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)]
Incarnation = Annotated[int, msgspec.Meta(ge=0, le=MAX_INCARNATION)]
Counter = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNTER)]
Nbytes = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Digest = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]

_JOB_RE = re.compile(_JOB_PATTERN)
_STEP_DIR_RE = re.compile(r"^step-([0-9]{9,12})\.i([0-9]{4,8})\Z")
_PARTIAL_RE = re.compile(r"^\.step-[0-9]{9,12}\.i[0-9]{4,8}\.partial-([0-9]{8})-([0-9]{10})-([0-9]{12})\Z")


_CLOCKED_FROM = 1767225600  # 2026-01-01, in seconds since 1970
_CLOCKED_S = 4  # less than a job takes to start again; the numbers last to the year 2038


def incarnation_at(now: float) -> int:
    """The number of a life that begins at this time (seconds since 1970) and whose store does not answer.

    Larger than those that stores count, and than those of earlier lives of this kind: nobody else has it, though
    nobody can be asked.
    """
    return min(MAX_INCARNATION, max(1, int(now - _CLOCKED_FROM) // _CLOCKED_S))


class JobKey(msgspec.Struct, frozen=True, order=True, array_like=True):
    """One training: a store directory and a job name in it. Two jobs of one name in two stores never meet."""

    store: StorePath
    job: JobName


class SaveId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """One checkpoint of one job. Ordered by (incarnation, counter): newest is largest, whatever clock or step say."""

    incarnation: Incarnation
    counter: Counter
    step: Step

    @property
    def text(self) -> str:
        """Fixed-width form, so that a cached file header is patched in place."""
        return f"{self.incarnation:08d}-{self.counter:010d}-{self.step:012d}"

    @property
    def dirname(self) -> str:
        """Final directory name. Always fresh: a step is saved at most once in an incarnation."""
        return f"step-{self.step:09d}.i{self.incarnation:04d}"

    @property
    def partial_dirname(self) -> str:
        """Hidden name of the directory until the commit's rename."""
        return f".{self.dirname}.partial-{self.text}"

    def __str__(self) -> str:
        return f"step {self.step} (incarnation {self.incarnation}, save {self.counter})"


def is_job_name(name: str) -> bool:
    """Whether name may be a directory of the store and part of a shared-memory path."""
    return _JOB_RE.match(name) is not None


def parse_dirname(name: str) -> tuple[int, int] | None:
    """(step, incarnation) of a final checkpoint directory's name, None for any other name."""
    match = _STEP_DIR_RE.match(name)
    return (int(match[1]), int(match[2])) if match else None


def parse_partial_dirname(name: str) -> SaveId | None:
    """The save a hidden partial directory belongs to, None for any other name."""
    match = _PARTIAL_RE.match(name)
    if match is None:
        return None
    save = SaveId(int(match[1]), int(match[2]), int(match[3]))
    return save if save.partial_dirname == name else None


def rank_of_file(name: FileName) -> int:
    """The rank whose image, or part of it, has this name in the checkpoint directory."""
    return int(name[1:].partition("-")[0])


def file_name(rank: int, part: int = 0, *, raw: bool = False) -> str:
    """Name of a rank's image, or of a part of it, in the checkpoint directory. raw: whose parts are no safetensors."""
    return f"r{rank:05d}-p{part:02d}.{'bin' if raw and part else 'safetensors'}"
