"""The names everything else is keyed by, and the checks a name must pass before it touches a path."""

import re
from typing import Annotated, Final, Self

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
_URL_PATTERN = rf"^(/|[a-z][a-z0-9+.-]{{0,30}}://)[^\x00-\x1f]{{0,{MAX_STORE_CHARS - 1}}}\Z"
_FILE_PATTERN = r"^r[0-9]{5,7}-p[0-9]{2,3}\.(safetensors|bin)\Z"
_NODE_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,254}\Z"
SET_PATTERN = r"^e[0-9]{8}-[0-9a-f]{8}\Z"
_SESSION_PATTERN = r"^[A-Za-z0-9._:-]{1,128}\Z"

JobName = Annotated[str, msgspec.Meta(pattern=_JOB_PATTERN)]
StorePath = Annotated[str, msgspec.Meta(pattern=_STORE_PATTERN)]
StoreUrl = Annotated[str, msgspec.Meta(pattern=_URL_PATTERN)]  # a path, or of another kind of store
FileName = Annotated[str, msgspec.Meta(pattern=_FILE_PATTERN)]
NodeName = Annotated[str, msgspec.Meta(pattern=_NODE_PATTERN)]
# A redundancy set of one epoch: the epoch, and the start of the digest of its nodes' names.
SetName = Annotated[str, msgspec.Meta(pattern=SET_PATTERN)]
Session = Annotated[str, msgspec.Meta(pattern=_SESSION_PATTERN)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
WorldSize = Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
Step = Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)]
Incarnation = Annotated[int, msgspec.Meta(ge=0, le=MAX_INCARNATION)]
Counter = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNTER)]
Nbytes = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Digest = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
RunId = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]  # random, drawn with each incarnation number
StoreId = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]  # random, made with the store's directory
StoreChoice = Annotated[str, msgspec.Meta(pattern=r"^(any|[0-9a-f]{32})?\Z")]  # of a user: empty is no choice

Run = tuple[Incarnation, RunId]  # an incarnation number, and the run that had it
NO_RUN: Final = bytes(16)  # before an incarnation was taken: no checkpoint has it
ANY_STORE: Final = "any"  # in place of a store's id: whatever store lies at the path, a new one too

_JOB_RE = re.compile(_JOB_PATTERN)
_STEP_DIR_RE = re.compile(r"^step-([0-9]{9,12})\.i([0-9]{4,8})\Z")
_SAVE_RE = re.compile(r"^([0-9]{8})-([0-9]{10})-([0-9]{12})-([0-9a-f]{32})\Z")

_CLOCKED_FROM = 1767225600  # 2026-01-01, in seconds since 1970
_CLOCKED_LEAST = 1_000_000  # no store has counted so far
_CLOCKED_S = 4  # less than a job takes to start again; the numbers last to the year 2038


def incarnation_at(now: float) -> int:
    """The number of a life that begins at this time (seconds since 1970) and whose store does not answer.

    Larger than numbers that stores count, and than earlier ones of this kind: it is unique, though
    nobody can be asked.
    """
    return min(MAX_INCARNATION, max(1, int(now - _CLOCKED_FROM) // _CLOCKED_S))


def clocked_from(number: int) -> float:
    """When the clock begins to show the number, in seconds since 1970."""
    return float(_CLOCKED_FROM + number * _CLOCKED_S)


def is_counted(number: int) -> bool:
    """Whether a store gave the number, by counting its records; others are the clock's."""
    return number < _CLOCKED_LEAST


def not_behind(number: int, now: float) -> int:
    """What a store gives that has come to this number: of the clock's kind, one that the clock has not passed.

    Those that it has passed may have been given while the store was silent, and be forgotten since.
    """
    return number if is_counted(number) else max(number, incarnation_at(now))


_AHEAD_S = 2 * 366 * 24 * 3600  # a clock that is wrong by less makes no number that is taken for a stranger's


def is_plausible(incarnation: int, now: float) -> bool:
    """Whether some life of a job can have had the number by this time: those counted are smaller than those clocked.

    Another one is of a damaged or a stranger's name: to count on from it would leave the job without numbers.
    """
    return incarnation <= incarnation_at(now + _AHEAD_S)


class JobKey(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """One training: a store and a job name in it. Two jobs of one name in two stores never meet."""

    store: StoreUrl
    job: JobName


class SaveId(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One checkpoint of one run of one job.

    Ordered by (incarnation, counter): newest is largest, whatever clock or step say. Incarnation numbers are counted
    in the store, so one that was emptied or swapped gives a number again. The run id distinguishes such runs: saves of
    two runs are never equal, and those of two runs of one number are not ordered, neither is before the other.
    """

    incarnation: Incarnation
    counter: Counter
    step: Step
    run: RunId

    def __lt__(self, other: Self) -> bool:
        if self.incarnation != other.incarnation:
            return self.incarnation < other.incarnation
        return self.run == other.run and (self.counter, self.step) < (other.counter, other.step)

    def __gt__(self, other: Self) -> bool:
        return other < self

    def __le__(self, other: Self) -> bool:
        return self == other or self < other

    def __ge__(self, other: Self) -> bool:
        return self == other or other < self

    @property
    def owner(self) -> Run:
        """The run that saved it."""
        return self.incarnation, self.run

    @property
    def listed(self) -> tuple[int, int, int, bytes]:
        """Key for a list that must have one order. Between two runs of one number it says nothing of their age."""
        return self.incarnation, self.counter, self.step, self.run

    @property
    def text(self) -> str:
        """Fixed-width form, so that a cached file header is patched in place."""
        return f"{self.incarnation:08d}-{self.counter:010d}-{self.step:012d}-{self.run.hex()}"

    @property
    def dirname(self) -> str:
        """Final directory name. Always fresh: a step is saved at most once in an incarnation."""
        return f"step-{self.step:09d}.i{self.incarnation:04d}"

    @property
    def partial_dirname(self) -> str:
        """Hidden name of the directory until the commit's rename."""
        return f".{self.dirname}.partial-{self.text}"

    def __str__(self) -> str:
        return f"step {self.step} (incarnation {self.incarnation})"


def is_job_name(name: str) -> bool:
    """Whether name may be a directory of the store and part of a shared-memory path."""
    return _JOB_RE.match(name) is not None


def parse_dirname(name: str) -> tuple[int, int] | None:
    """(step, incarnation) of a final checkpoint directory's name, None for any other name."""
    match = _STEP_DIR_RE.match(name)
    return (int(match[1]), int(match[2])) if match else None


def parse_save(text: str) -> SaveId | None:
    """The save of which this is the ``text``, None for any other text. To be compared by age: texts order runs too."""
    match = _SAVE_RE.match(text)
    return SaveId(int(match[1]), int(match[2]), int(match[3]), bytes.fromhex(match[4])) if match else None


def parse_partial_dirname(name: str) -> SaveId | None:
    """The save a hidden partial directory belongs to, None for any other name."""
    save = parse_save(name.rpartition(".partial-")[2])
    return save if save is not None and save.partial_dirname == name else None


def rank_of_file(name: FileName) -> int:
    """The rank whose image, or part of it, has this name in the checkpoint directory."""
    return int(name[1:].partition("-")[0])


def rank_of_image(name: str) -> int | None:
    """As rank_of_file; None for what has no such name."""
    return rank_of_file(name) if re.match(_FILE_PATTERN, name) else None


def file_name(rank: int, part: int = 0, *, raw: bool = False) -> str:
    """Name of a rank's image, or of a part of it, in the checkpoint directory. raw: whose parts are no safetensors."""
    return f"r{rank:05d}-p{part:02d}.{'bin' if raw and part else 'safetensors'}"
