"""Whether ranks of a job's session are in, or how they left, at the coordinator: one table. Pure."""

import enum

from ckptd.core.coordinator.state_table import Table


class Presence(enum.StrEnum):
    """What holds the job's memory."""

    OPEN = "open"
    CLOSING = "closing"  # every rank closed: it stays until the newest checkpoint is durable
    ORPHANED = "orphaned"  # it stays for another session, but not for ever


class SessionOn(enum.Enum):
    """What happens to the session."""

    ENTERED = "a rank is in"
    CLOSED = "all ranks closed"
    LEFT = "no rank is left"  # one ended without closing, or its node does not answer
    FOUND = "memory found at start"
    RELEASED = "memory given back"


SESSION: Table[Presence, SessionOn] = Table(
    {
        None: {
            SessionOn.FOUND: Presence.ORPHANED,
            SessionOn.ENTERED: Presence.OPEN,
            SessionOn.LEFT: Presence.ORPHANED,
        },
        Presence.OPEN: {SessionOn.CLOSED: Presence.CLOSING, SessionOn.LEFT: Presence.ORPHANED},
        Presence.CLOSING: {SessionOn.ENTERED: Presence.OPEN, SessionOn.RELEASED: None},
        Presence.ORPHANED: {
            SessionOn.FOUND: Presence.ORPHANED,
            SessionOn.ENTERED: Presence.OPEN,
            SessionOn.LEFT: Presence.ORPHANED,
            SessionOn.RELEASED: None,
        },
    },
    ignored={
        SessionOn.ENTERED: "others are in",
        SessionOn.CLOSED: "no rank is in at a node that answers: whose ranks all closed, it was open",
        SessionOn.LEFT: "every rank closed before",
        SessionOn.FOUND: "a daemon looks for it before any rank comes",
        SessionOn.RELEASED: "there is none, or ranks have need of it",
    },
)
