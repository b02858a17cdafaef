"""What a handle makes of parity: when it waits, when it gives up, and what the end of a save says beside it."""

import pytest

from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol.messages import End, Milestone, Progress
from ckptd_client import SaveFailedError, WaitTimeoutError
from ckptd_client._local.save_record import HandleBook, SaveRecord
from tests.runs import RUN

STAGED, PROTECTED, DURABLE = Milestone


class Client:
    """A book and its handles; each look at the news brings the next of them."""

    def __init__(self, scheme: Scheme) -> None:
        self.book = HandleBook()
        self.book.outlook.scheme, self.book.outlook.why_none = scheme, "redundancy is none"
        self.coming: list[Progress] = []

    def save(self, counter: int) -> SaveRecord:
        handle = SaveRecord(SaveId(1, counter, counter, RUN), self.pump)
        self.book.add(handle)
        return handle

    def pump(self, _seconds: float, _patience_s: float | None = None) -> None:
        self.book.hear([self.coming.pop(0)] if self.coming else [])

    def will_hear(self, handle: SaveRecord, milestone: Milestone | None = None, end: End | None = None) -> None:
        self.coming.append(Progress(save=handle.save_id, milestone=milestone, end=end, reason="news" if end else ""))


def test_a_kept_save_is_waited_for_until_its_parity_is_made():
    client = Client(Scheme.XOR)
    handle = client.save(1)
    client.will_hear(handle, STAGED)
    client.will_hear(handle, end=End.KEPT)
    client.will_hear(handle, PROTECTED)
    assert handle.wait("protected", 60).milestone == "protected"
    assert (handle.end, handle.reason) == ("kept", "news"), "that it is not drained is as true as before"
    with pytest.raises(SaveFailedError, match="ended as 'kept'") as caught:
        handle.wait("durable", 60)
    assert "drain_every" in caught.value.hint


def test_a_save_that_is_never_protected_is_waited_for_to_the_deadline():
    client = Client(Scheme.DOUBLE)
    handle = client.save(1)
    client.will_hear(handle, STAGED)
    client.will_hear(handle, end=End.KEPT)
    with pytest.raises(WaitTimeoutError, match="step 1 is staged"):
        handle.wait("protected", 0.2)


def test_a_newer_staged_save_ends_the_hope_for_a_kept_one():
    client = Client(Scheme.XOR)
    old, new = client.save(1), client.save(2)
    for handle in (old, new):
        client.will_hear(handle, STAGED)
        client.will_hear(handle, end=End.KEPT)
    with pytest.raises(SaveFailedError, match=r"step 2 \(.*\) was staged before it was protected"):
        old.wait("protected", 60)
    client.will_hear(old, PROTECTED)
    client.will_hear(new, PROTECTED)
    assert new.wait("protected", 60).reached(PROTECTED)
    assert old.wait("protected", 60).reached(PROTECTED), "what is made all the same counts"


@pytest.mark.parametrize("end", [End.SKIPPED, End.ABANDONED, End.FAILED, End.SUPERSEDED])
def test_other_ends_are_ends(end):
    client = Client(Scheme.XOR)
    handle = client.save(1)
    client.will_hear(handle, end=end)
    with pytest.raises(SaveFailedError, match=f"will not become protected: it ended as '{end}'"):
        handle.wait("protected", 60)


def test_a_superseded_save_can_be_protected_and_stays_superseded():
    client = Client(Scheme.XOR)
    handle = client.save(1)
    client.will_hear(handle, STAGED)
    client.will_hear(handle, end=End.SUPERSEDED)
    client.will_hear(handle, PROTECTED)
    assert [handle.milestone for _ in range(3)][-1] == "protected"
    assert handle.end == "superseded"


def test_durable_is_protected_and_protected_is_not_durable():
    client = Client(Scheme.XOR)
    handle = client.save(1)
    client.will_hear(handle, STAGED)
    client.will_hear(handle, PROTECTED)
    assert handle.wait("protected", 60).end is None
    client.will_hear(handle, DURABLE, End.DURABLE)
    client.will_hear(handle, PROTECTED)
    assert handle.wait("durable", 60).wait("protected").milestone == "durable"
    assert (handle.milestone, handle.end) == ("durable", "durable")


def test_without_a_scheme_a_drain_is_waited_for_and_nothing_else():
    client = Client(Scheme.NONE)
    due, kept = client.save(1), client.save(2)
    client.will_hear(due, STAGED)
    client.will_hear(due, DURABLE, End.DURABLE)
    assert due.wait("protected", 60).milestone == "durable"
    client.will_hear(kept, STAGED)
    client.will_hear(kept, end=End.KEPT)
    with pytest.raises(SaveFailedError, match="nothing protects it: redundancy is none"):
        kept.wait("protected", 60)


def test_a_save_given_up_here_that_the_daemon_protected_all_the_same_lives():
    client = Client(Scheme.XOR)
    handle = client.save(1)
    handle.fail(End.FAILED, "no answer in time")
    client.will_hear(handle, PROTECTED)
    assert handle.wait("protected", 60).end is None
