"""Looks at stores: what lies there, delivered as an event, and to each caller that waits for it."""

from collections.abc import Callable

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.shared.base.errors import parted
from ckptd.shared.base.ids import JobKey
from ckptd.store.facts import Taker
from ckptd.store.messages import Claim, Done, Failed, ScanJob, Scanned, SweepTrash
from ckptd.store.workers import Stores

_SOON_S = 3.0  # a command that waits for its answer gives up after 5 s


class StoreLooks:
    """``note_all`` receives problems, ``finish_left`` is called when leftovers may be finished."""

    def __init__(  # noqa: PLR0913, PLR0917 - the daemon's parts
        self,
        node: str,
        stores: Stores,
        deliver: Callable[[ev.Event], None],
        note_all: Callable[[JobKey, list[str]], None],
        finish_left: Callable[[JobKey], None],
        timeout_s: float,
    ) -> None:
        self._node = node
        self._stores = stores
        self._deliver = deliver
        self._note_all = note_all
        self._finish_left = finish_left
        self._timeout_s = timeout_s

    def look(self, action: act.ScanStore, then: Callable[[ev.StoreScanned], None]) -> None:
        """As scan, for a caller that waits: then is called once it was delivered, within seconds."""
        self.scan(action, then, min(_SOON_S, self._timeout_s))

    def scan(
        self,
        action: act.ScanStore,
        then: Callable[[ev.StoreScanned], None] = lambda _: None,
        patience_s: float | None = None,
    ) -> None:
        """Asks the store's worker. What a killed process left there is tidied up afterwards."""
        job = action.job

        def answer(reply: Done | Failed) -> None:
            if isinstance(reply, Done) and isinstance(reply.result, Scanned):
                self._note_all(job, [*reply.result.store.warnings, *reply.result.scan.strange])
                found = _scanned(action, reply.result)
                self._deliver(found)
                then(found)
                self._stores.ask(job.store, lambda i: SweepTrash(id=i, job=job.job), lambda _: None)
                self._finish_left(job)
            else:
                problem = problem_of(reply) or "an answer of the wrong kind"
                unseen = ev.StoreScanned(job=job, after=action.after, problem=problem)
                self._deliver(unseen)
                then(unseen)

        self._stores.ask(
            job.store,
            lambda i: ScanJob(
                id=i,
                job=job.job,
                make=action.make,
                remembered=list(action.remembered),
                wanted=action.wanted,
                claim=_claim(action.claim, self._node),
            ),
            answer,
            patience_s=patience_s or self._timeout_s,
        )


def problem_of(reply: Done | Failed) -> str:
    """Why the worker could not, with what to do; empty when it could."""
    if isinstance(reply, Done):
        return ""
    return f"{reply.message} ({reply.hint})" if reply.hint else reply.message


def _claim(made_up: act.Claim | None, node: str) -> Claim | None:
    return None if made_up is None else Claim(made_up.incarnation, Taker(made_up.run, made_up.session, node))


def _scanned(action: act.ScanStore, found: Scanned) -> ev.StoreScanned:
    scan = found.scan
    committed = tuple(
        ev.OnStore(e.committed.save, e.committed.world_size, e.committed.nbytes, e.dirname, e.committed.replicas)
        for e in scan.committed
    )
    partials = tuple(ev.Partial(p.save, not p.missing) for p in scan.partials)
    problems = [parted(problem) for problem in scan.problems]
    return ev.StoreScanned(
        job=action.job, after=action.after, store_id=found.store.store_id, committed=committed, partials=partials,
        claimed=action.claim.incarnation if action.claim is not None else 0, lost=found.lost,
        records=tuple(ev.Recorded(r.incarnation, bytes.fromhex(r.run), r.session) for r in scan.records),
        notes=tuple(text for text, _ in problems), cures=tuple(cure for _, cure in problems if cure),
        others=tuple(found.others),
    )  # fmt: skip
