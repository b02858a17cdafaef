"""The states of a load at its coordinator, as one table. Pure."""

import enum

from ckptd.core.coordinator.state_table import Table


class Loading(enum.StrEnum):
    """Where the one load of a job rests between two events."""

    COLLECTING = "collecting"  # ranks call, nodes report, the store is looked at: then a checkpoint is chosen
    FETCHING = "fetching"
    DRAINING = "draining"
    READING = "reading"


class LoadOn(enum.Enum):
    """What happens to it."""

    CALLED = "a rank calls"
    MISSING = "segments lie elsewhere"
    CAME = "all came, or cannot"
    UNSTORED = "must be on the store first"
    STORED = "on the store, or never"
    LATE = "too late"
    SENT = "every rank has a route"
    UNREAD = "a rank could not read"
    AGREED = "all ranks read it"
    EMPTY = "nothing to restore"
    REFUSED = "refused"
    ENDED_BEFORE = "had ended before"  # this daemon restarted since


_OVER = {LoadOn.REFUSED: None}

RESTORE: Table[Loading, LoadOn] = Table(
    {
        None: {LoadOn.CALLED: Loading.COLLECTING},
        Loading.COLLECTING: {
            LoadOn.MISSING: Loading.FETCHING,
            LoadOn.UNSTORED: Loading.DRAINING,
            LoadOn.SENT: Loading.READING,
            LoadOn.EMPTY: None,
            LoadOn.ENDED_BEFORE: None,
            **_OVER,
        },
        Loading.FETCHING: {LoadOn.CAME: Loading.COLLECTING, LoadOn.LATE: Loading.COLLECTING, **_OVER},
        Loading.DRAINING: {LoadOn.STORED: Loading.COLLECTING, LoadOn.LATE: Loading.COLLECTING, **_OVER},
        Loading.READING: {LoadOn.AGREED: None, LoadOn.UNREAD: Loading.COLLECTING, **_OVER},
    },
    ignored={
        LoadOn.CALLED: "one load runs in a job: a rank that calls again receives what the others have",
        LoadOn.MISSING: "no checkpoint is chosen now",
        LoadOn.CAME: "it was not ordered, or is not wanted any more",
        LoadOn.UNSTORED: "no checkpoint is chosen now",
        LoadOn.STORED: "it is not waited for",
        LoadOn.LATE: "the load is refused",
        LoadOn.SENT: "no checkpoint is chosen now",
        LoadOn.UNREAD: "no rank reads",
        LoadOn.AGREED: "no rank reads",
        LoadOn.EMPTY: "no checkpoint is chosen now",
        LoadOn.REFUSED: "no load runs",
        LoadOn.ENDED_BEFORE: "no load runs, or all ranks called, and those of this node first-hand",
    },
)
