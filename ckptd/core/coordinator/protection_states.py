"""The states of a checkpoint's parity, of the nodes as they are in one epoch, at the coordinator: one table. Pure."""

import enum

from ckptd.core.coordinator.state_table import Table


class Encoding(enum.StrEnum):
    """How far the sets of one epoch have come with a save. At most one is on its way, and one is protected."""

    ENCODING = "encoding"
    STUCK = "stuck"
    PROTECTED = "protected"


class EncodingOn(enum.Enum):
    """What happens to it."""

    ORDERED = "ordered"  # of all sets
    FAILED = "a node failed"
    MENDED = "no failure left"
    SEALED = "all nodes sealed theirs"
    FOUND = "all nodes reported theirs"
    GIVEN_UP = "given up"  # a newer one is encoded instead, or the nodes changed
    SURPASSED = "a newer one protected"
    RELEASED = "released"  # the job is over, or the save is lost


_OVER = {EncodingOn.RELEASED: None}
_RUNS = {
    EncodingOn.FOUND: Encoding.PROTECTED,
    EncodingOn.FAILED: Encoding.STUCK,
    EncodingOn.GIVEN_UP: None,
    **_OVER,
}

PROTECTION: Table[Encoding, EncodingOn] = Table(
    {
        None: {EncodingOn.ORDERED: Encoding.ENCODING, EncodingOn.FOUND: Encoding.PROTECTED},
        Encoding.ENCODING: {EncodingOn.SEALED: Encoding.PROTECTED, **_RUNS},
        Encoding.STUCK: {EncodingOn.MENDED: Encoding.ENCODING, **_RUNS},
        Encoding.PROTECTED: {EncodingOn.SURPASSED: None, **_OVER},
    },
    ignored={
        EncodingOn.ORDERED: "it is ordered again from nodes that may have missed it",
        EncodingOn.FAILED: "it is sealed, or not wanted",
        EncodingOn.MENDED: "nothing failed",
        EncodingOn.SEALED: "it is protected or not wanted, or a node cannot",
        EncodingOn.FOUND: "it is protected",
        EncodingOn.GIVEN_UP: "it is sealed, or not wanted",
        EncodingOn.SURPASSED: "it is not protected",
        EncodingOn.RELEASED: "there is none",
    },
)
