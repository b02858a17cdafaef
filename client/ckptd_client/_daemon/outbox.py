"""What this rank has sent to its daemon of its saves, and sends again to the next daemon if this one ends."""

import logging
from collections.abc import Callable

import msgspec
import zmq

from ckptd.shared.base.errors import CkptdError, WaitTimeoutError
from ckptd.shared.base.ids import SaveId
from ckptd.shared.protocol.messages import HandOver, Progress, Reply, Request, Skip
from ckptd_client._daemon.channel import ChannelLostError
from ckptd_client._local.save_record import HandleBook

log = logging.getLogger("ckptd_client")
_MAX_MISSED = 16  # more than a rank has slots: other ranks keep no more incomplete saves
_MAX_REASON_CHARS = 4000
Ask = Callable[[Callable[[int], Request], float], Reply]


class Outbox:
    """The messages of one client. ask: makes a request, with a deadline. Call its methods under the client's lock."""

    def __init__(self, ask: Ask, book: HandleBook) -> None:
        self._ask = ask
        self._book = book
        self.handed_over: Callable[[], object] = int  # called once the daemon has another segment of this rank
        self._unacknowledged: dict[SaveId, HandOver] = {}
        self._forced: dict[SaveId, HandOver] = {}  # must be drained, and have not ended
        self._missed: dict[SaveId, str] = {}  # failed here, with the reason; the coordinator does not know it yet

    def hand_over(self, descriptor: HandOver, *, deadline: float) -> None:
        """Hands a sealed segment over to the daemon, again to the next daemon if this one ends first. Blocks."""
        save = descriptor.save
        self._unacknowledged[save] = descriptor
        if descriptor.drain:
            self._forced[save] = descriptor
        try:
            self._send(descriptor, deadline)
        except (ChannelLostError, WaitTimeoutError):
            raise
        except CkptdError:
            self.forget(save)
            raise
        self._unacknowledged.pop(save, None)
        self.handed_over()

    def skip(self, save: SaveId, reason: str, deadline: float) -> None:
        """Notifies the coordinator that this rank cannot take part in the save: until then others hold slots for it.

        After the deadline no answer is awaited. Where no daemon runs, the next one is notified.
        """
        reason = self._missed[save] = reason[:_MAX_REASON_CHARS]
        for old in list(self._missed)[:-_MAX_MISSED]:
            del self._missed[old]
        try:
            self._ask(lambda seq: Skip(seq=seq, save=save, reason=reason), deadline)
        except ChannelLostError:
            return
        except (CkptdError, zmq.ZMQError) as error:  # a daemon that runs has it, or refuses it
            log.debug("ckptd: step %d was missed, and the daemon answers: %s", save.step, error)
        del self._missed[save]

    def repeat(self, deadline: float) -> None:
        """Sends all hand-overs again to a daemon that has just accepted this rank.

        A save whose acknowledgement never came may have ended: that is no reason to stay away. A daemon that has
        restarted does not know which of the saves in its memory must be drained.
        """
        unacknowledged = list(self._unacknowledged.values())
        for old in [*unacknowledged, *(one for one in self._forced.values() if one not in unacknowledged)]:
            try:
                if old in unacknowledged:
                    self.hand_over(old, deadline=deadline)
                else:
                    self._send(msgspec.structs.replace(old, drain=True), deadline)
            except (ChannelLostError, WaitTimeoutError):
                raise
            except CkptdError as error:
                self._forced.pop(old.save, None)  # the save has ended, and its slot has another owner
                if old in unacknowledged:
                    self._book.give_up(old.save, str(error))

    def skip_again(self, deadline: float) -> None:
        """Notifies a daemon that has just accepted this rank of the saves that failed meanwhile."""
        for save, reason in list(self._missed.items()):
            self.skip(save, reason, deadline)

    def _send(self, descriptor: HandOver, deadline: float) -> None:
        self._ask(lambda seq: msgspec.structs.replace(descriptor, seq=seq), deadline)

    def update(self, progress: Progress) -> None:
        """The daemon knows the save: without a milestone and an end it may have other ranks' segments alone."""
        if progress.milestone is not None or progress.end is not None:
            self._unacknowledged.pop(progress.save, None)
        if progress.end is not None:
            self._forced.pop(progress.save, None)

    def forget(self, save: SaveId) -> None:
        """Forgets a save that was given up: no other daemon gets it."""
        self._unacknowledged.pop(save, None)
        self._forced.pop(save, None)

    def holds(self, save: SaveId) -> bool:
        """Whether the save is sealed and not handed over yet."""
        return save in self._unacknowledged

    @property
    def held(self) -> list[SaveId]:
        """Saves that are not handed over yet."""
        return list(self._unacknowledged)

    def begin(self) -> None:
        """Gives up saves of the previous incarnation that were not handed over: a load has begun a new one."""
        for save in self._unacknowledged:
            self._book.give_up(save, "a load began before the daemon had it")
        for kept in (self._unacknowledged, self._forced, self._missed):
            kept.clear()
