"""The states of a scrub, of a node's memory and of a job's checkpoints on the store, as two tables. Pure."""

import enum

from ckptd.core.coordinator.state_table import Table


class MemoryScrubbing(enum.StrEnum):
    """What a node waits for; nothing is while it rests."""

    READING = "reading"  # a block
    REBUILDING = "rebuilding"  # a segment, or parity, from the other nodes of the set
    COPYING = "copying"  # a block from the store


class MemoryOn(enum.Enum):
    """What happens to it."""

    DUE = "its turn"
    SOUND = "sound"
    GONE = "released meanwhile"
    COVERED = "damaged, the set can make it again"
    STORED = "damaged, the store may have it"
    LOST = "damaged, nothing has it"
    MENDED = "sound again"


MEMORY_SCRUB: Table[MemoryScrubbing, MemoryOn] = Table(
    {
        None: {MemoryOn.DUE: MemoryScrubbing.READING},
        MemoryScrubbing.READING: {
            MemoryOn.SOUND: None,
            MemoryOn.GONE: None,
            MemoryOn.COVERED: MemoryScrubbing.REBUILDING,
            MemoryOn.STORED: MemoryScrubbing.COPYING,
            MemoryOn.LOST: None,
        },
        MemoryScrubbing.REBUILDING: {
            MemoryOn.MENDED: None,
            MemoryOn.GONE: None,
            MemoryOn.STORED: MemoryScrubbing.COPYING,
            MemoryOn.LOST: None,
        },
        MemoryScrubbing.COPYING: {MemoryOn.MENDED: None, MemoryOn.GONE: None, MemoryOn.LOST: None},
    },
    ignored={
        MemoryOn.DUE: "one block is read at a time, and nothing while something is mended",
        MemoryOn.SOUND: "nothing is read",
        MemoryOn.GONE: "nothing is read or mended",
        MemoryOn.COVERED: "nothing is read",
        MemoryOn.STORED: "nothing is known to be damaged, or the store was asked",
        MemoryOn.LOST: "nothing is known to be damaged",
        MemoryOn.MENDED: "nothing is being mended",
    },
)


class StoreScrubbing(enum.StrEnum):
    """What the coordinator waits for; nothing is while it rests."""

    READING = "reading"  # a piece of a checkpoint
    MENDING = "mending"  # its images, by nodes that have them in memory, or from parity on the store


class StoreOn(enum.Enum):
    """What happens to it."""

    DUE = "its turn"
    SOUND = "sound"
    GONE = "removed meanwhile"
    SILENT = "the store did not answer"
    IMAGES = "damaged images"
    LOST = "damaged, nothing can make it again"
    ANSWERED = "all nodes answered, or are lost"
    LATE = "some node did not answer, and is asked again"


STORE_SCRUB: Table[StoreScrubbing, StoreOn] = Table(
    {
        None: {StoreOn.DUE: StoreScrubbing.READING},
        StoreScrubbing.READING: {
            StoreOn.SOUND: None,
            StoreOn.GONE: None,
            StoreOn.SILENT: None,
            StoreOn.LOST: None,
            StoreOn.IMAGES: StoreScrubbing.MENDING,
        },
        StoreScrubbing.MENDING: {StoreOn.ANSWERED: None, StoreOn.LATE: StoreScrubbing.MENDING},
    },
    ignored={
        StoreOn.DUE: "one piece is read at a time, and nothing while something is mended",
        StoreOn.SOUND: "nothing is read",
        StoreOn.GONE: "nothing is read",
        StoreOn.SILENT: "nothing is read",
        StoreOn.IMAGES: "nothing is read",
        StoreOn.LOST: "nothing is read",
        StoreOn.ANSWERED: "no node was asked",
        StoreOn.LATE: "no node is waited for",
    },
)
