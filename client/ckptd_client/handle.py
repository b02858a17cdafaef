"""What a save returns."""

import weakref

from ckptd.shared.base.ids import SaveId
from ckptd.shared.protocol.messages import End, Milestone
from ckptd_client._local.save_record import SaveRecord


class SaveHandle:
    """The progress of one save on this rank.

    `milestone` and `end` first take in the updates that the daemon has sent.
    """

    def __init__(self, record: SaveRecord) -> None:
        self._record = record

    @property
    def step(self) -> int:
        """The number of the step."""
        return self._record.step

    @property
    def save_id(self) -> SaveId:
        """The identity of the checkpoint: run, incarnation, counter and step."""
        return self._record.save_id

    @property
    def milestone(self) -> Milestone | None:
        """The highest milestone reached so far: 'staged', 'protected', 'durable', or None."""
        return self._record.milestone

    @property
    def end(self) -> End | None:
        """How the save ended, None while more can come.

        "durable", "kept" (not due for a drain), "superseded", "skipped", "abandoned" or "failed".
        """
        return self._record.end

    @property
    def reason(self) -> str:
        """Why it ended so, or what went wrong. Empty if nothing did."""
        return self._record.reason

    @property
    def stall_s(self) -> float:
        """Seconds that `save` held up the caller."""
        return self._record.stall_s

    def wait(self, milestone: str = "staged", timeout_s: float | None = None) -> "SaveHandle":
        """Blocks until the save has reached the milestone; a higher one counts, so a durable save is a protected one.

        Without redundancy (none asked for, or a single node) "protected" takes a drain: it is reached if this save is
        due for one, else it is out of reach once the save is staged. With redundancy a save that ended as "kept" can be
        protected until a newer one is staged; a lost node delays that until its set is complete again, so pass
        `timeout_s`.

        Args:
            milestone: "staged", "protected" or "durable".
            timeout_s: Most seconds to wait. Default: no limit.

        Returns:
            This handle.

        Raises:
            SaveFailedError: The milestone is out of reach, as soon as that is known; with the reason.
            WaitTimeoutError: It was not reached in time; it may still be.
            UsageError: No milestone has that name.
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
