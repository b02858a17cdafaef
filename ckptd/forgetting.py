"""``ckptd forget``: the memory of a job that no longer runs is given back, and what its arena remembers of it."""

import logging
from collections.abc import Callable

from ckptd.arena_stores import KnownStores
from ckptd.background import Background
from ckptd.core import actions as act
from ckptd.core.catalogue import Catalogue
from ckptd.logs import line
from ckptd.protocol.errors import CkptdError
from ckptd.protocol.messages import AskForget, Forgotten, Refused, Reply

log = logging.getLogger("ckptd")


class Forgetting:
    """``perform`` does an action; ``cleaning`` is the one thread in which memory is given back, in order."""

    def __init__(
        self,
        catalogue: Catalogue,
        known_stores: KnownStores,
        cleaning: Background,
        perform: Callable[[act.Action], None],
    ) -> None:
        self._catalogue = catalogue
        self._known_stores = known_stores
        self._cleaning = cleaning
        self._perform = perform

    def forget(self, request: AskForget, answer: Callable[[Reply], None]) -> None:
        """answer is called once the memory is given back, or at once with the reason why it is not."""
        job = self._catalogue.jobs.get(request.job)
        sizes = [slot.capacity for slot in job.node.slots] if job else []
        if job is not None or self._known_stores.of(request.job) is None:  # else its memory is given back already
            try:
                actions = self._catalogue.forget(request.job, force=request.force)
            except CkptdError as error:
                answer(Refused(reply_to=request.seq, code=error.code, message=error.message, hint=error.hint))
                return
            log.info(line("forgetting", job=request.job.job, slots=len(sizes), force=request.force))
            for action in actions:
                self._perform(action)
        done = Forgotten(reply_to=request.seq, slots=len(sizes), nbytes=sum(sizes))
        self._cleaning.run(lambda: self._known_stores.forget(request.job), lambda _: answer(done))
