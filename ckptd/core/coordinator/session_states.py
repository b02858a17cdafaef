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


_LEFT = {SessionOn.CLOSED: Presence.CLOSING, SessionOn.LEFT: Presence.ORPHANED}
_EMPTY = {SessionOn.ENTERED: Presence.OPEN, **_LEFT}

SESSION: Table[Presence, SessionOn] = Table(
    {
        None: {SessionOn.FOUND: Presence.ORPHANED, **_EMPTY},
        Presence.OPEN: _LEFT,
        Presence.CLOSING: {SessionOn.RELEASED: None, **_EMPTY},
        Presence.ORPHANED: {SessionOn.RELEASED: None, SessionOn.FOUND: Presence.ORPHANED, **_EMPTY},
    },
    ignored={
        SessionOn.ENTERED: "others are in",
        SessionOn.FOUND: "a daemon looks for it before any rank comes",
        SessionOn.RELEASED: "there is none, or ranks have need of it",
    },
)
