"""The worker processes, one per store: sends them requests, waits without blocking, replaces one that died or hangs."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ckptd.shared.format.integrity import XXH3, Integrity
from ckptd.shared.protocol.status import WorkerStatus
from ckptd.store.messages import Done, Failed, Progress, Request
from ckptd.store.worker_link import StoreLink, WorkerDiedError
from ckptd.system.niceness import Niceness

_MAX_STUCK = 3  # killed workers that a hung mount keeps from ending; no more are started beside them

Answer = Callable[[Done | Failed], None]


@dataclass(slots=True)
class _Pending:
    answer: Answer
    progress: Callable[[Progress], None] | None
    deadline: float | None
    minor: bool


@dataclass(slots=True)
class _Store:
    path: str
    link: StoreLink | None = None
    pending: dict[int, _Pending] = field(default_factory=dict)
    heard: float = 0.0
    stuck: list[StoreLink] = field(default_factory=list)
    problem: str = ""
    retired: bool = False


class Stores:
    """Owns the workers. Not for several threads; every answer is called from ``receive``, ``tick`` or ``ask``.

    hang_s: a worker with work to do that says nothing for so long is taken for hung. One long fsync is such a silence.
    """

    def __init__(self, *, niceness: Niceness, hang_s: float, integrity: Integrity = XXH3) -> None:
        self._niceness = niceness
        self._integrity = integrity
        self._hang_s = hang_s
        self._stores: dict[str, _Store] = {}
        self._next_id = 0
        # One thread that lives as long as we do: the workers that it starts end with it.
        self._starting = ThreadPoolExecutor(1, thread_name_prefix="start")

    def ask(  # noqa: PLR0913 - keyword-only
        self,
        store: str,
        make: Callable[[int], Request],
        answer: Answer,
        *,
        progress: Callable[[Progress], None] | None = None,
        patience_s: float | None = None,
        minor: bool = False,
    ) -> None:
        """Sends make(id) to the store's worker. answer is called once, with Failed after patience_s without one.

        minor: nobody waits for it: a worker that was silent over it alone has as long as any for what comes next.
        """
        state = self._stores.setdefault(store, _Store(store))
        state.retired = False
        now = time.monotonic()
        self._next_id += 1
        request = make(self._next_id)
        if not self._ensure(state):
            text = f"{len(state.stuck)} workers hang in {store}"
            answer(Failed(self._next_id, "hung", "", text, "is the mount alive? try: stat " + store))
            return
        assert state.link is not None  # noqa: S101 - _ensure made it
        if all(one.minor for one in state.pending.values()):
            state.heard = now
        deadline = None if patience_s is None else now + patience_s
        state.pending[request.id] = _Pending(answer, progress, deadline, minor)
        state.link.send(request)

    def _ensure(self, state: _Store) -> bool:
        state.stuck = [link for link in state.stuck if link.poll() is None]
        if state.link is None and len(state.stuck) < _MAX_STUCK:
            state.link = StoreLink(
                state.path, niceness=self._niceness, start=self._starting.submit, integrity=self._integrity
            )
        return state.link is not None

    @property
    def links(self) -> list[StoreLink]:
        """Live workers' links, to be polled."""
        return [state.link for state in self._stores.values() if state.link is not None]

    @property
    def busy(self) -> bool:
        """Whether any request is not answered yet that somebody waits for."""
        return any(not one.minor for state in self._stores.values() for one in state.pending.values())

    def receive(self, link: StoreLink) -> None:
        """Takes what the worker says; to be called when its link is readable."""
        state = next((s for s in self._stores.values() if s.link is link), None)
        if state is None:
            return
        try:
            replies = link.receive()
        except WorkerDiedError as error:
            self._lose(state, str(error))
            return
        state.heard, state.problem = time.monotonic(), ""
        for reply in replies:
            if isinstance(reply, Progress):
                pending = state.pending.get(reply.id)
                if pending is not None and pending.progress is not None:
                    pending.progress(reply)
            elif reply.id in state.pending:
                state.pending.pop(reply.id).answer(reply)
        self._end_retired(state)

    def _lose(self, state: _Store, problem: str) -> None:
        link, state.link = state.link, None
        if link is not None:
            link.kill()
            state.stuck.append(link)
        state.problem = problem
        pending, state.pending = state.pending, {}
        for request_id, waiting in pending.items():
            waiting.answer(Failed(request_id, "worker", "", problem, ""))

    def next_deadline(self) -> float | None:
        """When tick must be called at the latest (time.monotonic)."""
        times = [p.deadline for s in self._stores.values() for p in s.pending.values() if p.deadline is not None]
        times += [s.heard + self._hang_s for s in self._stores.values() if s.pending]
        return min(times, default=None)

    def tick(self) -> None:
        """Fails requests whose patience is over; replaces a worker that hangs."""
        now = time.monotonic()
        for state in self._stores.values():
            state.stuck = [link for link in state.stuck if link.poll() is None]
            late = [i for i, p in state.pending.items() if p.deadline is not None and now >= p.deadline]
            for request_id in late:
                text = f"{state.path} did not answer in time"
                state.problem = text
                state.pending.pop(request_id).answer(Failed(request_id, "late", "", text, "is the mount alive?"))
            if state.pending and now - state.heard >= self._hang_s:
                self._lose(state, f"{state.path} hangs: no word from its worker for {self._hang_s:g} s")

    def retire(self, store: str) -> None:
        """No job uses the store any more: its worker ends once it has answered everything."""
        state = self._stores.get(store)
        if state is not None:
            state.retired = True
            self._end_retired(state)

    @staticmethod
    def _end_retired(state: _Store) -> None:
        if state.retired and not state.pending and state.link is not None:
            state.link.kill()
            state.stuck.append(state.link)
            state.link = None

    def status(self) -> list[WorkerStatus]:
        """One line per store."""
        now = time.monotonic()
        return [
            WorkerStatus(
                store=s.path,
                pid=s.link.pid if s.link else 0,
                busy=len(s.pending),
                idle_s=round(now - s.heard, 1) if s.heard else 0.0,
                problem=s.problem,
            )
            for s in self._stores.values()
            if s.link is not None or s.problem
        ]

    def close(self) -> None:
        """Ends all workers without waiting for one that hangs."""
        for state in self._stores.values():
            if state.link is not None:
                state.link.kill()
                state.stuck.append(state.link)
        for link in [link for state in self._stores.values() for link in state.stuck]:
            for _ in range(20):
                if link.poll() is not None:
                    break
                time.sleep(0.01)
        self._starting.shutdown(wait=False, cancel_futures=True)
