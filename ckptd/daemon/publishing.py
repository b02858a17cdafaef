"""Sends the arena's intents to store workers: with each commit, and for what an earlier one left."""

from collections.abc import Callable
from functools import partial

from ckptd.arena.publications import Publications
from ckptd.daemon.store_scans import problem_of
from ckptd.shared.base.errors import CkptdError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.protocol.messages import AskPublish, End, Progress, Refused, Reply
from ckptd.shared.protocol.messages import Done as Accepted
from ckptd.shared.protocol.publication import Intent, Publication, check_publication
from ckptd.store.messages import Done, Failed, Publish, Published
from ckptd.store.workers import Stores


class Publishing:
    """note_all: receives what could not be published."""

    def __init__(
        self, publications: Publications, stores: Stores, note_all: Callable[[JobKey, list[str]], None]
    ) -> None:
        self._publications = publications
        self._stores = stores
        self._note_all = note_all
        self._failed: set[tuple[JobKey, SaveId]] = set()  # here; tried again when the store is looked at
        self._asking: set[tuple[JobKey, SaveId]] = set()  # each rank of the node learns that the save is durable

    def intents(self, job: JobKey, save: SaveId) -> list[Intent]:
        """For a request that publishes this save."""
        return self._publications.from_on(job, save)

    def committed(self, job: JobKey, save: SaveId, intents: list[Intent], *, published: bool) -> None:
        """This daemon committed the save, and its worker published it, or could not. intents: those it received."""
        if published:
            self._done(job, [save], intents)
        else:
            self._failed.add((job, save))

    def hear(self, job: JobKey, message: Reply) -> None:
        """Sees a message to a rank: of a save that another node committed, this node's own part is due."""
        if not isinstance(message, Progress) or message.end is not End.DURABLE:
            return
        save = message.save
        if self._publications.is_due(job, save) and (job, save) not in self._failed | self._asking:
            self._asking.add((job, save))
            done = partial(self._asking.discard, (job, save))
            self._ask(job, self.intents(job, save), own_part=save, then=lambda _: done())

    def finish_left(self, job: JobKey) -> None:
        """Asks for all that is still to be done, and for what no process here can do."""
        self._ask(job, self._publications.due(job))

    def asked(self, job: JobKey, request: AskPublish, answer: Callable[[Reply], None]) -> None:
        """A rank wants a state at one more place: that is on record when it is answered, and tried if it waits."""
        accepted, to = Accepted(reply_to=request.seq), Publication.of_state(request.draft)
        try:
            check_publication(to, job)
            self._publications.keep(job, request.save, to)
        except (OSError, CkptdError) as error:
            answer(Refused.of(request, error))
            return
        if not request.wait:
            answer(accepted)

        def tried(problems: list[str]) -> None:
            if request.wait:
                answer(Refused.of(request, CkptdError("; ".join(problems))) if problems else accepted)

        self._ask(job, self.intents(job, request.save), own_part=request.save, then=tried)

    def _ask(
        self,
        job: JobKey,
        intents: list[Intent],
        own_part: SaveId | None = None,
        then: Callable[[list[str]], None] = lambda _: None,
    ) -> None:
        """then: receives what could not be published, and why, which is noted as well."""

        def answer(reply: Done | Failed) -> None:
            if isinstance(reply, Done) and isinstance(reply.result, Published):
                problems = reply.result.notes
                self._done(job, reply.result.done, intents)
            else:
                what = f"{own_part} is" if own_part is not None else "what an earlier daemon left is"
                problems = [f"{what} not published: {problem_of(reply)}"] if intents else []
            self._note_all(job, problems)
            then(problems)

        self._stores.ask(job.store, lambda i: Publish(id=i, job=job.job, intents=intents, own_part=own_part), answer)

    def _done(self, job: JobKey, saves: list[SaveId], intents: list[Intent]) -> None:
        for intent in (intent for intent in intents if intent.save in saves):
            self._failed.discard((job, intent.save))
            self._publications.done(job, intent)
