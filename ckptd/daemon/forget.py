"""``ckptd forget``: the memory of a job that no longer runs is given back, and what its arena remembers of it."""

import logging
from collections.abc import Callable

from ckptd.arena.known_stores import KnownStores
from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.core.jobs import Catalogue
from ckptd.daemon.background import Background
from ckptd.shared.base.errors import CkptdError
from ckptd.shared.base.log_line import line
from ckptd.shared.protocol.messages import AskForget, Forgotten, Refused, Reply

log = logging.getLogger("ckptd")


class Forgetting:
    """``perform`` does an action; ``look`` asks what lies on a store.

    ``cleaning`` is the one thread in which memory is given back, in order.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        known_stores: KnownStores,
        cleaning: Background,
        perform: Callable[[act.Action], None],
        look: Callable[[act.ScanStore, Callable[[ev.StoreScanned], None]], None],
    ) -> None:
        self._catalogue = catalogue
        self._known_stores = known_stores
        self._cleaning = cleaning
        self._perform = perform
        self._look = look

    def forget(self, request: AskForget, answer: Callable[[Reply], None]) -> None:
        """answer is called once the memory is given back, or with the reason why it is not.

        Before anything is given back on the word that it is durable, the store is looked at.
        """
        scan = None if request.force else self._catalogue.look_before_forgetting(request.job)
        if scan is None:
            self._forget(request, answer)
        else:
            self._look(scan, lambda seen: self._forget(request, answer, seen))

    def _forget(self, request: AskForget, answer: Callable[[Reply], None], seen: ev.StoreScanned | None = None) -> None:
        job = self._catalogue.jobs.get(request.job)
        sizes = [slot.capacity for slot in job.node.slots] if job else []
        if job is not None or self._known_stores.of(request.job) is None:  # else its memory is given back already
            try:
                actions = self._catalogue.forget(request.job, force=request.force, seen=seen)
            except CkptdError as error:
                answer(Refused.of(request, error))
                return
            log.info(line("forgetting", job=request.job.job, slots=len(sizes), force=request.force))
            for action in actions:
                self._perform(action)
        done = Forgotten(reply_to=request.seq, slots=len(sizes), nbytes=sum(sizes))
        self._cleaning.run(lambda: self._known_stores.forget(request.job), lambda _: answer(done))
