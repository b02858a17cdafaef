"""The states of a save at its coordinator, as one table. Pure."""

import enum

from ckptd.core.coordinator.state_table import Table
from ckptd.shared.protocol.messages import End


class State(enum.StrEnum):
    """Where a save rests between two events."""

    STAGING = "staging"
    KEPT = "kept"
    QUEUED = "queued"
    DRAINING = "draining"
    COMMITTING = "committing"
    DURABLE = "durable"
    FAILED = "failed"
    SUPERSEDED = "superseded"
    ABANDONED = "abandoned"
    SKIPPED = "skipped"


class On(enum.Enum):
    """What happens to it."""

    BEGUN = "begun"  # a node or the store has something of it
    WHOLE = "whole, not due"  # all ranks delivered it
    WHOLE_DUE = "whole, due"
    DIFFERS = "replicas differ"  # what its ranks hold alike is not the same
    INCOMPLETE = "a rank is missing"  # it left, was too late, or a newer save is whole
    SKIPPED = "a rank skipped it"
    CLASHED = "steps differ"
    DISPUTED = "number disputed"  # another run has it too
    TAKEN_OVER = "job taken over"  # by another session
    ASKED = "asked for"  # by a user, or by a load
    ITS_TURN = "its turn"  # the one that was queued lost its own
    PASSED_ON = "its turn passed on"  # which was lent to it: a newer one has it now
    STORE_FREE = "store free"
    OUTRUN = "overtaken, or memory gone"
    NO_CHANCE = "store silent, or memory gone"
    VOTED = "all nodes voted"
    VOTES_FOUND = "all votes found"  # on the store
    BROKEN = "failed, again later"  # a node or the store
    HOPELESS = "failed too long, or memory gone"
    AGAIN = "once more"
    RENAMED = "renamed and synced"
    FOUND = "found committed"
    FORGOTTEN = "forgotten"  # it is of no use, or of another run


_FOUND = {On.FOUND: State.DURABLE, On.VOTES_FOUND: State.COMMITTING, On.FORGOTTEN: None}
_PART = {On.WHOLE: State.KEPT, On.WHOLE_DUE: State.QUEUED, On.DIFFERS: State.ABANDONED, **_FOUND}

SAVE: Table[State, On] = Table(
    {
        None: {On.BEGUN: State.STAGING},
        State.STAGING: {
            On.INCOMPLETE: State.ABANDONED,
            On.SKIPPED: State.SKIPPED,
            On.CLASHED: State.FAILED,
            On.DISPUTED: State.FAILED,
            **_PART,
        },
        State.KEPT: {
            On.ASKED: State.QUEUED,
            On.ITS_TURN: State.QUEUED,
            On.DISPUTED: State.FAILED,
            **_FOUND,
        },
        State.QUEUED: {
            On.STORE_FREE: State.DRAINING,
            On.OUTRUN: State.SUPERSEDED,
            On.PASSED_ON: State.KEPT,
            On.NO_CHANCE: State.FAILED,
            On.DISPUTED: State.FAILED,
            On.TAKEN_OVER: State.FAILED,
            **_FOUND,
        },
        State.DRAINING: {
            On.VOTED: State.COMMITTING,
            On.VOTES_FOUND: State.COMMITTING,
            On.BROKEN: State.QUEUED,
            On.HOPELESS: State.FAILED,
            On.TAKEN_OVER: State.FAILED,
        },
        State.COMMITTING: {
            On.RENAMED: State.DURABLE,
            On.AGAIN: State.COMMITTING,
            On.BROKEN: State.QUEUED,
            On.HOPELESS: State.FAILED,
            On.TAKEN_OVER: State.FAILED,
        },
        State.DURABLE: {On.FORGOTTEN: None},
        State.FAILED: {On.ASKED: State.QUEUED, On.ITS_TURN: State.QUEUED, **_FOUND},
        State.SUPERSEDED: {
            On.ASKED: State.QUEUED,
            On.ITS_TURN: State.QUEUED,
            On.DISPUTED: State.FAILED,
            **_FOUND,
        },
        State.ABANDONED: _PART,
        State.SKIPPED: {On.FORGOTTEN: None},
    },
    ignored={
        On.BEGUN: "it is known",
        On.WHOLE: "it was whole before, or cannot be",
        On.WHOLE_DUE: "it was whole before, or cannot be",
        On.DIFFERS: "it was whole before, or cannot be",
        On.INCOMPLETE: "it waits for no rank",
        On.SKIPPED: "it waits for no rank",
        On.CLASHED: "it was whole before, or has ended",
        On.DISPUTED: "nothing of such a number is drained, and it has ended",
        On.TAKEN_OVER: "it is not on its way to the store",
        On.ASKED: "it is on its way, on the store, or not whole",
        On.ITS_TURN: "it is on its way, on the store, or not whole",
        On.PASSED_ON: "it waits for no drain",
        On.STORE_FREE: "it waits for no drain",
        On.OUTRUN: "it waits for no drain",
        On.NO_CHANCE: "it waits for no drain",
        On.VOTED: "no drain of it runs",
        On.VOTES_FOUND: "its commit is made or was, or a rank skipped it",
        On.BROKEN: "no drain of it runs",
        On.HOPELESS: "no drain of it runs",
        On.AGAIN: "no commit of it runs",
        On.RENAMED: "no commit of it runs",
        On.FOUND: "its own drain says so or has, or a rank skipped it",
        On.FORGOTTEN: "it is on its way to the store",
    },
)

ENDS = {
    State.DURABLE: End.DURABLE,
    State.KEPT: End.KEPT,
    State.SUPERSEDED: End.SUPERSEDED,
    State.SKIPPED: End.SKIPPED,
    State.ABANDONED: End.ABANDONED,
    State.FAILED: End.FAILED,
}
ON_STORE_WAY = frozenset({State.DRAINING, State.COMMITTING})  # the one that the store is busy with
WHOLE = frozenset({State.KEPT, State.QUEUED, *ON_STORE_WAY, State.DURABLE})  # all ranks delivered it, for sure
OPEN = frozenset({State.KEPT, State.QUEUED, State.FAILED, State.SUPERSEDED})  # with "staged": in memory, not durable
