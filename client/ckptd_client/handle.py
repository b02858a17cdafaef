"""What a save returns."""

import weakref

from ckptd.shared.base.ids import SaveId
from ckptd.shared.protocol.messages import End, Milestone
from ckptd_client._local.save_record import SaveRecord


class SaveHandle:
    """One save's fate. ``milestone`` and ``end`` are as of the last news; reading them fetches what has come."""

    def __init__(self, record: SaveRecord) -> None:
        self._record = record

    @property
    def step(self) -> int:
        """The training step."""
        return self._record.step

    @property
    def save_id(self) -> SaveId:
        """Incarnation, counter and step: the checkpoint's identity."""
        return self._record.save_id

    @property
    def milestone(self) -> Milestone | None:
        """The highest milestone reached so far: 'staged', 'protected', 'durable', or None."""
        return self._record.milestone

    @property
    def end(self) -> End | None:
        """How it ended, None while more can come."""
        return self._record.end

    @property
    def reason(self) -> str:
        """Why it ended so, or what went wrong."""
        return self._record.reason

    @property
    def stall_s(self) -> float:
        """Seconds that ``save`` held up the caller."""
        return self._record.stall_s

    def wait(self, milestone: str = "staged", timeout_s: float | None = None) -> "SaveHandle":
        """Blocks until the milestone is reached; a higher one counts, so a durable save is a protected one.

        Raises SaveFailedError, with the reason, as soon as it is out of reach; WaitTimeoutError after timeout_s.
        Without redundancy (none is asked for, or there is one node only) "protected" takes a drain: it is waited for
        if this save is due for one, else it is out of reach once staged. With it, a save that ended ``kept`` can be
        protected until a newer one is staged; a lost node delays that until its set is whole again, so give timeout_s.
        """
        self._record.wait(milestone, timeout_s)
        return self

    def __repr__(self) -> str:
        return repr(self._record)


def handle_of(record: SaveRecord) -> SaveHandle:
    """The handle of a save: one for all callers, while one of them has it."""
    found = record.handle()
    handle: SaveHandle = SaveHandle(record) if found is None else found
    record.handle = weakref.ref(handle)
    return handle
