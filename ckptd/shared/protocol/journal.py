"""A job's journal: what happened to it, as records in segments beside its checkpoints. Pure.

A segment is a file ``<job>/.journal/i0003-0123abcd/000007``: of an incarnation and the first bytes of its run's id. One
daemon writes it, that of the run's coordinator, and each time as a whole: a longer one takes its place until it is
``SEGMENT_NBYTES`` long. Then the next one begins.

Bytes of a segment: magic; then for each record its length, the checksum of its body, its body in msgpack. Whoever
reads skips a record whose checksum is wrong, and what follows a length that cannot be, and counts them.
"""

import struct
from collections.abc import Iterable
from typing import Annotated, NamedTuple

import msgspec
import xxhash

from ckptd.shared.base.decoding import MALFORMED
from ckptd.shared.base.ids import Counter, Incarnation, Nbytes, RunId, Step, WorldSize
from ckptd.shared.protocol.messages import End, Tier

JOURNAL_DIR = ".journal"
SEGMENT_NBYTES = 256 << 10
MAX_RECORD_NBYTES = 4096
_MAGIC = b"CKPTDJN1"
_HEAD = struct.Struct("<IQ")  # bytes of the body, XXH3-64 of it

At = Annotated[float, msgspec.Meta(ge=0)]  # seconds since 1970, by the clock of the coordinator's node
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Text = Annotated[str, msgspec.Meta(max_length=512)]
Node = Annotated[str, msgspec.Meta(max_length=256)]


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Something that happened. at: when the coordinator learned of it."""

    at: At


class RunBegan(Record, frozen=True, kw_only=True, omit_defaults=True, tag="run"):
    """A session of the job, from its connect or load on. Each segment begins with that of its run, again."""

    incarnation: Incarnation
    run: RunId
    world_size: WorldSize
    nodes: WorldSize
    coordinator: Node
    scheme: Text = "none"
    set_size: int = 0
    drain_every: Text = ""  # as the user gave it
    version: Text = ""
    again: bool = False  # the run began before: another daemon, or another segment, continues its journal


class RunEnded(Record, frozen=True, kw_only=True, omit_defaults=True, tag="end"):
    """The run is over. Without this record it ended in a way that no daemon lived to tell, or still runs."""

    how: Text  # closed, lost (its ranks ended without a word), taken over


class Staged(Record, frozen=True, kw_only=True, omit_defaults=True, tag="staged"):
    """All ranks have staged a save. seconds: since its first rank was heard of; stalls: that the ranks report."""

    counter: Counter
    step: Step
    nbytes: Nbytes
    seconds: Seconds
    stall_s: Seconds = 0.0  # the longest of a rank's
    mean_stall_s: Seconds = 0.0
    late_nbytes: Nbytes = 0  # of them, copied while the training went on


class Protected(Record, frozen=True, kw_only=True, omit_defaults=True, tag="protected"):
    """Every redundancy set has encoded it. seconds: since it was staged."""

    counter: Counter
    seconds: Seconds


class Durable(Record, frozen=True, kw_only=True, omit_defaults=True, tag="durable"):
    """It is committed. seconds: since it was staged; drain_s: of the drain and commit that succeeded."""

    counter: Counter
    seconds: Seconds
    drain_s: Seconds
    nbytes: Nbytes
    tries: int = 1


class Ended(Record, frozen=True, kw_only=True, omit_defaults=True, tag="ended"):
    """A save came to another end than durable."""

    counter: Counter
    step: Step
    end: End
    reason: Text = ""


class Lost(Record, frozen=True, kw_only=True, omit_defaults=True, tag="lost"):
    """A node does not answer any more, or ranks ended without a word."""

    node: Node
    what: Text  # node, arena (its daemon is back, without what it had), ranks
    ranks: int = 0


class Restored(Record, frozen=True, kw_only=True, omit_defaults=True, tag="restored"):
    """A load succeeded on all ranks. newest: the last step known to have been reached before; -1: not known."""

    incarnation: Incarnation  # of the checkpoint
    counter: Counter
    step: Step
    seconds: Seconds  # since the first rank asked
    tiers: dict[Tier, int]  # ranks, by where each read
    nbytes: Nbytes = 0
    newest: int = -1


class Steps(Record, frozen=True, kw_only=True, omit_defaults=True, tag="steps"):
    """The step that the training has reached, as the ranks of the coordinator's node say by ``client.step``."""

    step: Step


class Problem(Record, frozen=True, kw_only=True, omit_defaults=True, tag="problem"):
    """A line of the log: a drain that failed, an error. times: that it was said since the last record of it."""

    text: Text
    times: int = 1


class Missing(Record, frozen=True, kw_only=True, omit_defaults=True, tag="missing"):
    """Records that could not be kept while the store was away: the oldest go first."""

    records: int


Entry = (
    RunBegan | RunEnded | Staged | Protected | Durable | Ended | Lost | Restored | Steps | Problem | Missing
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Entry)


class Segment(NamedTuple):
    """What a segment holds. damaged: records that cannot be read; all behind a wrong length count as one."""

    entries: list[Entry]
    damaged: int


def folder(incarnation: int, run: RunId) -> str:
    """Of a run's segments, in the job's location."""
    return f"{JOURNAL_DIR}/i{incarnation:04d}-{run.hex()[:8]}"


def framed(entry: Entry) -> bytes:
    """A record as it lies in a segment."""
    body = _encoder.encode(entry)
    return _HEAD.pack(len(body), xxhash.xxh3_64_intdigest(body)) + body


def segment(records: Iterable[bytes]) -> bytes:
    """The content of a segment of framed records."""
    return b"".join((_MAGIC, *records))


def read_segment(data: bytes) -> Segment:
    """Of any bytes. Raises nothing."""
    if not data.startswith(_MAGIC):
        return Segment([], 1)
    entries: list[Entry] = []
    damaged, offset = 0, len(_MAGIC)
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
