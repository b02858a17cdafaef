"""The states of a checkpoint's parity, of the nodes as they are in one epoch, at the coordinator: one table. Pure."""

import enum

from ckptd.core.coordinator.state_table import Table


class Encoding(enum.StrEnum):
    """How far the sets of one epoch have come with a save. At most one is on its way, and one is protected."""

    ENCODING = "encoding"
    STUCK = "stuck"
    PROTECTED = "protected"


class Hears(enum.Enum):
    """What happens to it."""

    ORDERED = "all sets are to encode it"
    FAILED = "a node cannot encode it now"
    MENDED = "no node is left that cannot"
    SEALED = "all nodes sealed their parity"
    FOUND = "all nodes reported their parity"
    GIVEN_UP = "a newer one is encoded instead, or the nodes changed"
    SURPASSED = "a newer one is protected"
    RELEASED = "the job is over, or it is lost"


_OVER = {Hears.RELEASED: None}
_RUNS = {
    Hears.FOUND: Encoding.PROTECTED,
    Hears.FAILED: Encoding.STUCK,
    Hears.GIVEN_UP: None,
    **_OVER,
}

PROTECTION: Table[Encoding, Hears] = Table(
    {
        None: {Hears.ORDERED: Encoding.ENCODING, Hears.FOUND: Encoding.PROTECTED},
        Encoding.ENCODING: {Hears.SEALED: Encoding.PROTECTED, **_RUNS},
        Encoding.STUCK: {Hears.MENDED: Encoding.ENCODING, **_RUNS},
        Encoding.PROTECTED: {Hears.SURPASSED: None, **_OVER},
    },
    ignored={
        Hears.ORDERED: "it is ordered again from nodes that may have missed it",
        Hears.FAILED: "it is sealed, or not wanted",
        Hears.MENDED: "nothing failed",
        Hears.SEALED: "it is protected or not wanted, or a node cannot",
        Hears.FOUND: "it is protected",
        Hears.GIVEN_UP: "it is sealed, or not wanted",
        Hears.SURPASSED: "it is not protected",
        Hears.RELEASED: "there is none",
    },
)
