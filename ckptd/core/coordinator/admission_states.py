"""How far a session that waits to join has come, at the coordinator: one table. Pure."""

import enum

from ckptd.core.coordinator.state_table import Table


class Admission(enum.StrEnum):
    """What the session waits for."""

    GATHERING = "gathering"  # nodes name their ranks
    PLACED = "placed"  # every rank has a node: former nodes report, ranks of other sessions end
    NUMBERING = "numbering"  # one session at a time


class AdmissionOn(enum.Enum):
    """What happens to it."""

    CAME = "a rank waits"
    WHOLE = "every rank has a node"
    LEFT = "a rank ended"
    HEARD = "no other session lives, or takeover"
    EMPTIED = "no rank waits any more"
    REFUSED = "refused"  # its ranks or nodes do not fit, it waited too long, the store cannot be used
    LOST = "its nodes do not answer"
    OPENED = "the number is there"  # it is the job now


_WAITS = {AdmissionOn.EMPTIED: None, AdmissionOn.REFUSED: None}

ADMISSION: Table[Admission, AdmissionOn] = Table(
    {
        None: {AdmissionOn.CAME: Admission.GATHERING},
        Admission.GATHERING: {AdmissionOn.WHOLE: Admission.PLACED, **_WAITS},
        Admission.PLACED: {AdmissionOn.LEFT: Admission.GATHERING, AdmissionOn.HEARD: Admission.NUMBERING, **_WAITS},
        Admission.NUMBERING: {AdmissionOn.OPENED: None, AdmissionOn.LOST: None, AdmissionOn.REFUSED: None},
    },
    ignored={
        AdmissionOn.CAME: "it waits already",
        AdmissionOn.WHOLE: "it was whole before",
        AdmissionOn.LEFT: "it is not whole; or its number comes, and the session opens without that rank",
        AdmissionOn.HEARD: "its nodes are not known, or its number was asked for",
        AdmissionOn.EMPTIED: "its number comes: then it is seen that its nodes do not answer, or no rank is in",
        AdmissionOn.REFUSED: "no session waits",
        AdmissionOn.LOST: "its nodes report again when they answer",
        AdmissionOn.OPENED: "no number was asked for",
    },
)
