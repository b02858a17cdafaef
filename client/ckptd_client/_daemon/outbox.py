"""What this rank has told its daemon of its saves, and tells the next one again if this one ends."""

import logging
from collections.abc import Callable

import msgspec
import zmq

from ckptd.shared.base.errors import CkptdError, WaitTimeoutError
from ckptd.shared.base.ids import SaveId
from ckptd.shared.protocol.messages import HandOver, Progress, Reply, Request, Skip
from ckptd_client._daemon.channel import ChannelLostError
from ckptd_client.handle import HandleBook

log = logging.getLogger("ckptd_client")
_MAX_MISSED = 16  # more than any rank has slots: others hold no more saves than that in vain
_MAX_REASON_CHARS = 4000
Ask = Callable[[Callable[[int], Request], float], Reply]


class Outbox:
    """``ask`` makes one request, up to a deadline. Used under the client's lock only."""

    def __init__(self, ask: Ask, book: HandleBook) -> None:
        self._ask = ask
        self._book = book
        self.handed_over: Callable[[], object] = int  # called when the daemon has another segment of this rank's
        self._unacknowledged: dict[SaveId, HandOver] = {}
        self._forced: dict[SaveId, HandOver] = {}  # to be drained for sure, and not over yet
        self._missed: dict[SaveId, str] = {}  # failed here, with the reason, and nobody has been told yet

    def hand_over(self, descriptor: HandOver, *, deadline: float) -> None:
        """Gives a sealed segment to the daemon. Kept and repeated to the next daemon if this one ends first."""
        save = descriptor.save
        self._unacknowledged[save] = descriptor
        if descriptor.drain:
            self._forced[save] = descriptor
        try:
            self._tell(descriptor, deadline)
        except (ChannelLostError, WaitTimeoutError):
            raise
        except CkptdError:
            self.let_go(save)
            raise
        self._unacknowledged.pop(save, None)
        self.handed_over()

    def skip(self, save: SaveId, reason: str, deadline: float) -> None:
        """Tells the coordinator that this rank cannot take part in the save: others hold slots for it until they know.

        After the deadline it is told without waiting for its answer. Where no daemon is there to be told, the next is.
        """
        reason = self._missed[save] = reason[:_MAX_REASON_CHARS]
        for old in list(self._missed)[:-_MAX_MISSED]:
            del self._missed[old]
        try:
            self._ask(lambda seq: Skip(seq=seq, save=save, reason=reason), deadline)
        except ChannelLostError:
            return
        except (CkptdError, zmq.ZMQError) as error:  # one that is there has heard it, or will not hear of it
            log.debug("ckptd: step %d was missed, and the daemon says of it: %s", save.step, error)
        del self._missed[save]

    def repeat(self, deadline: float) -> None:
        """Tells a daemon that has just let this rank in.

        An acknowledgement that never came may have been for a save that is over by now: no reason to stay away. Nor
        does a daemon that has restarted know which of the saves in its memory is to be drained for sure.
        """
        unacknowledged = list(self._unacknowledged.values())
        for old in [*unacknowledged, *(one for one in self._forced.values() if one not in unacknowledged)]:
            try:
                if old in unacknowledged:
                    self.hand_over(old, deadline=deadline)
                else:
                    self._tell(msgspec.structs.replace(old, drain=True), deadline)
            except (ChannelLostError, WaitTimeoutError):
                raise
            except CkptdError as error:
                self._forced.pop(old.save, None)  # it is over, and its slot another's
                if old in unacknowledged:
                    self._book.give_up(old.save, str(error))

    def skip_again(self, deadline: float) -> None:
        """Tells a daemon that has just let this rank in what nobody was told."""
        for save, reason in list(self._missed.items()):
            self.skip(save, reason, deadline)

    def _tell(self, descriptor: HandOver, deadline: float) -> None:
        self._ask(lambda seq: msgspec.structs.replace(descriptor, seq=seq), deadline)

    def heard(self, news: Progress) -> None:
        """The daemon says how far a save is; without a milestone and an end only other ranks' segments are known."""
        if news.milestone is not None or news.end is not None:
            self._unacknowledged.pop(news.save, None)
        if news.end is not None:
            self._forced.pop(news.save, None)

    def let_go(self, save: SaveId) -> None:
        """The save is given up, and is handed to no other daemon."""
        self._unacknowledged.pop(save, None)
        self._forced.pop(save, None)

    def holds(self, save: SaveId) -> bool:
        """Whether the save is sealed and still to be handed over."""
        return save in self._unacknowledged

    @property
    def held(self) -> list[SaveId]:
        """Saves that are still to be handed over."""
        return list(self._unacknowledged)

    def begin(self) -> None:
        """A load has begun an incarnation: what was not handed over before is of no use to it."""
        for save in self._unacknowledged:
            self._book.give_up(save, "a load began before the daemon heard of it")
        for told in (self._unacknowledged, self._forced, self._missed):
            told.clear()
