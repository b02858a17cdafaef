"""A job's journal: what happened to it, as records in segments beside its checkpoints. Pure.

A segment is a file ``<job>/.journal/i00000003-0123abcd-89abcdef-000007``: of an incarnation, the first bytes of its
run's id, and a writer. The writer is a daemon that coordinates the run, and draws the name's part at random: no other
one puts a file of this name. It puts the segment as a whole each time: a longer one takes its place until it has
``SEGMENT_NBYTES``. Then the next one begins.

Bytes of a segment: magic; then for each record its length, the checksum of its body, its body in msgpack: an array of
the tag and the fields in order. Fields are added at the end, with a default. A reader skips a record whose
checksum is wrong, and what follows a length that cannot be, and counts them.
"""

import re
import struct
from collections.abc import Iterable
from typing import Annotated, NamedTuple

import msgspec
import xxhash

from ckptd.shared.base.decoding import MALFORMED
from ckptd.shared.base.ids import Counter, Incarnation, Nbytes, RunId, Step, WorldSize
from ckptd.shared.protocol.messages import MAX_S, End, Tier

JOURNAL_DIR = ".journal"
SEGMENT_NBYTES = 256 << 10
MAX_SEGMENT_NBYTES = SEGMENT_NBYTES + (64 << 10)  # the last record may go past the end, and a reader reads no more
MAX_JOURNAL_NBYTES = 16 << 20  # all segments of a job: the oldest go
MAX_SEGMENTS = 1024  # of a job, likewise
MAX_RECORD_NBYTES = 4096
MAX_TEXT_CHARS = 512
MAGIC = b"CKPTDJN1"
_HEAD = struct.Struct("<IQ")  # bytes of the body, XXH3-64 of it
_NAME_RE = re.compile(r"^i([0-9]{8})-([0-9a-f]{8})-([0-9a-f]{8})-([0-9]{6})\Z")

# A reader draws any of these times and durations, or their sum, on one axis: each stays within the years 1 to 9999.
At = Annotated[float, msgspec.Meta(ge=0, le=1e11)]  # seconds since 1970, by the clock of the coordinator's node
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_S)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT_CHARS)]
Node = Annotated[str, msgspec.Meta(max_length=256)]


LOSSES = ("node", "arena", "ranks")


class Record(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Something that happened. at: when the coordinator learned of it."""

    at: At


class RunBegan(Record, frozen=True, kw_only=True, array_like=True, tag="run"):
    """A session of the job, from its connect or load on. Each segment begins with that of its run, again."""

    incarnation: Incarnation
    run: RunId
    world_size: WorldSize
    nodes: WorldSize
    coordinator: Node
    scheme: Text = "none"
    set_size: Count = 0
    drain_every: Text = ""  # as the user gave it
    version: Text = ""
    again: bool = False  # the run began before: another daemon, or another segment, continues its journal


class RunEnded(Record, frozen=True, kw_only=True, array_like=True, tag="end"):
    """The run is over. Without this record it ended in a way that no daemon lived to tell, or still runs."""

    how: Text  # closed, failed (at an exception), lost (no word of its ranks), taken over, loaded (the next run began)


class Staged(Record, frozen=True, kw_only=True, array_like=True, tag="staged"):
    """All ranks have staged a save. seconds: since the training of the first went on; stalls: that they report."""

    counter: Counter
    step: Step
    nbytes: Nbytes
    seconds: Seconds
    stall_s: Seconds = 0.0  # the longest of a rank's
    mean_stall_s: Seconds = 0.0
    late_nbytes: Nbytes = 0  # of them, copied while the training went on


class Protected(Record, frozen=True, kw_only=True, array_like=True, tag="protected"):
    """Every redundancy set has encoded it. seconds: since it was staged; 0: another daemon saw that."""

    counter: Counter
    seconds: Seconds


class Durable(Record, frozen=True, kw_only=True, array_like=True, tag="durable"):
    """It is committed. seconds: since it was staged; drain_s: of the drain and commit that succeeded; 0: not known."""

    counter: Counter
    seconds: Seconds
    drain_s: Seconds
    nbytes: Nbytes
    tries: Count = 1
    incarnation: Incarnation = 0  # that saved it, if that is not the run's own


class Ended(Record, frozen=True, kw_only=True, array_like=True, tag="ended"):
    """A save came to another end than durable, as far as it is known: one that failed may still become durable."""

    counter: Counter
    step: Step
    end: End
    reason: Text = ""
    incarnation: Incarnation = 0  # as of Durable


class Lost(Record, frozen=True, kw_only=True, array_like=True, tag="lost"):
    """A node does not answer any more, or ranks ended without a word."""

    node: Node
    what: Text  # of LOSSES; arena: its daemon is back, without what it had
    ranks: Count = 0


class Restored(Record, frozen=True, kw_only=True, array_like=True, tag="restored"):
    """A load succeeded on all ranks. newest: the last step known to have been reached before; -1: not known."""

    incarnation: Incarnation  # of the checkpoint
    counter: Counter
    step: Step
    seconds: Seconds  # since the first rank asked
    tiers: dict[Tier, Count]  # ranks, by where each read
    nbytes: Nbytes = 0  # of all images; 0: not known
    newest: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 62)] = -1


class Damaged(Record, frozen=True, kw_only=True, array_like=True, tag="damaged"):
    """A scrub found damage. tier: arena: a slot; rebuilt: parity in memory; pfs: a file on the store."""

    incarnation: Incarnation  # of the checkpoint
    counter: Counter
    step: Step
    node: Node
    tier: Tier
    rank: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 20)] = -1  # -1: of none
    what: Text = ""
    mended: Text = ""  # from where it was made good; empty: it is not


class Steps(Record, frozen=True, kw_only=True, array_like=True, tag="steps"):
    """The step that the training has reached, as the ranks of the coordinator's node say by ``client.step``."""

    step: Step


class Problem(Record, frozen=True, kw_only=True, array_like=True, tag="problem"):
    """A line of the log: a drain that failed, an error. times: that it was said since the last record of it."""

    text: Text
    times: Count = 1


class Missing(Record, frozen=True, kw_only=True, array_like=True, tag="missing"):
    """Records that could not be kept while the store was away: the oldest go first."""

    records: Count


Entry = (
    RunBegan | RunEnded | Staged | Protected | Durable | Ended | Lost | Restored | Damaged | Steps | Problem | Missing
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Entry)


class Segment(NamedTuple):
    """What a segment holds. damaged: records that cannot be read; all behind a wrong length count as one."""

    entries: list[Entry]
    damaged: int


class Name(NamedTuple):
    """Of a segment. In order: of one run and writer, as they were written."""

    incarnation: int
    run: str  # the first 8 digits of its id
    writer: str  # 8 digits
    number: int

    @property
    def text(self) -> str:
        """In the folder."""
        return f"i{self.incarnation:08d}-{self.run}-{self.writer}-{self.number:06d}"

    @property
    def path(self) -> str:
        """In the job's location."""
        return f"{JOURNAL_DIR}/{self.text}"

    def is_of(self, began: RunBegan) -> bool:
        """Whether this run's segments have such names."""
        return (self.incarnation, self.run) == (began.incarnation, run_digits(began.run))


def run_digits(run: RunId) -> str:
    """Of a run, in names."""
    return run.hex()[:8]


def parse_name(text: str) -> Name | None:
    """None for what is no segment's."""
    match = _NAME_RE.match(text)
    return Name(int(match[1]), match[2], match[3], int(match[4])) if match else None


def framed(entry: Entry) -> bytes:
    """A record as it lies in a segment."""
    body = _encoder.encode(entry)
    return _HEAD.pack(len(body), xxhash.xxh3_64_intdigest(body)) + body


def segment(records: Iterable[bytes]) -> bytes:
    """The content of a segment of framed records."""
    return b"".join((MAGIC, *records))


def read_segment(data: bytes) -> Segment:
    """Of any bytes. Raises nothing."""
    if not data.startswith(MAGIC):
        return Segment([], 1)
    entries: list[Entry] = []
    damaged, offset = 0, len(MAGIC)
    while offset < len(data):
        if offset + _HEAD.size > len(data):
            return Segment(entries, damaged + 1)
        nbytes, checksum = _HEAD.unpack_from(data, offset)
        offset += _HEAD.size
        body = data[offset : offset + nbytes]
        if nbytes > MAX_RECORD_NBYTES or len(body) < nbytes:
            return Segment(entries, damaged + 1)
        offset += nbytes
        entry = _decoded(body) if xxhash.xxh3_64_intdigest(body) == checksum else None
        if entry is None:
            damaged += 1
        else:
            entries.append(entry)
    return Segment(entries, damaged)


def _decoded(body: bytes) -> Entry | None:
    try:
        entry: Entry = _decoder.decode(body)
    except MALFORMED:
        return None
    return entry
