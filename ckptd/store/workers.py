"""The worker processes, one per store: sends them requests, waits without blocking, replaces one that died or hangs."""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ckptd.shared.format.integrity import XXH3, Integrity
from ckptd.shared.protocol.status import WorkerStatus
from ckptd.store.messages import MAIN, Done, Failed, Progress, Request, lane_of
from ckptd.store.worker_link import StoreLink, WorkerDiedError
from ckptd.system.niceness import Niceness

_MAX_STUCK = 3  # killed workers that a hung mount keeps from ending; no more are started beside them

Answer = Callable[[Done | Failed], None]


@dataclass(slots=True)
class _Pending:
    request: Request
    answer: Answer | None  # None: it was given up, and holds its lane until it ends
    progress: Callable[[Progress], None] | None
    patience_s: float | None
    deadline: float | None = None

    @property
    def lane(self) -> str:
        return lane_of(self.request)

    def heard(self, now: float) -> None:
        """There is word of it, or it is sent."""
        if self.answer is not None and self.patience_s is not None:
            self.deadline = now + self.patience_s


@dataclass(slots=True)
class _Store:
    path: str
    link: StoreLink | None = None
    pending: dict[int, _Pending] = field(default_factory=dict)  # that the worker has
    waiting: deque[_Pending] = field(default_factory=deque)  # for their lane
    heard: float = 0.0  # the last word of its main lane: the others say nothing of that
    spoke: float = 0.0  # of any
    stuck: list[StoreLink] = field(default_factory=list)
    problem: str = ""
    retired: bool = False

    @property
    def at_work(self) -> bool:
        """Whether the worker has something to do in its main lane."""
        return any(one.lane == MAIN for one in self.pending.values())


class Stores:
    """Owns the workers. Not for several threads; every answer is called from ``receive``, ``tick`` or ``ask``.

    hang_s: a worker with work in its main lane that says nothing of it for so long is taken for hung. One long fsync is
    such a silence. A request of another lane is given up by itself, and holds its lane until it ends; once nothing else
    is asked for the worker is replaced.
    """

    def __init__(self, *, niceness: Niceness, hang_s: float, integrity: Integrity = XXH3) -> None:
        self._niceness = niceness
        self._integrity = integrity
        self._hang_s = hang_s
        self._stores: dict[str, _Store] = {}
        self._next_id = 0
        # One thread that lives as long as we do: the workers that it starts end with it.
        self._starting = ThreadPoolExecutor(1, thread_name_prefix="start")

    def ask(
        self,
        store: str,
        make: Callable[[int], Request],
        answer: Answer,
        *,
        progress: Callable[[Progress], None] | None = None,
        patience_s: float | None = None,
    ) -> None:
        """Sends make(id) to the store's worker, once its lane is free.

        answer is called once, with Failed after patience_s without word of it; outside the main lane after hang_s if
        left out.
        """
        state = self._stores.setdefault(store, _Store(store))
        state.retired = False
        self._next_id += 1
        request = make(self._next_id)
        if lane_of(request) != MAIN and patience_s is None:
            patience_s = self._hang_s
        state.waiting.append(_Pending(request, answer, progress, patience_s))
        self._settle(state)

    def _settle(self, state: _Store) -> None:
        """Ends a worker that has nothing to do, or only what was given up; sends what waits for a lane that is free."""
        state.stuck = [link for link in state.stuck if link.poll() is None]
        if all(one.answer is None for one in state.pending.values()):
            hangs = state.pending and not state.stuck  # else it costs no more than the lanes that hang
            if hangs or (state.retired and not state.waiting):
                self._end(state)
        waiting, state.waiting = state.waiting, deque()
        for one in waiting:
            self._send(state, one)

    def _send(self, state: _Store, one: _Pending) -> None:
        """Now, or when its lane is free; what holds that may have been given up."""
        held = next((p for p in state.pending.values() if p.lane == one.lane != MAIN), None)
        if held is not None and held.answer is not None:
            state.waiting.append(one)
            return
        link = None if held is not None else self._link(state)
        if link is None:
            hanging = "an earlier request of its kind hangs" if held else f"{len(state.stuck)} workers hang"
            hint = f"is the mount alive? try: stat {state.path}"
            assert one.answer is not None  # noqa: S101 - nothing that waits is given up
            one.answer(Failed(one.request.id, "hung", "", f"{hanging} in {state.path}", hint))
            return
        now = time.monotonic()
        if one.lane == MAIN and not state.at_work:
            state.heard = now
        if not state.pending:
            state.spoke = now
        one.heard(now)
        state.pending[one.request.id] = one
        link.send(one.request)

    def _link(self, state: _Store) -> StoreLink | None:
        """To the worker, started if there is none; None: too many hang."""
        if state.link is None and len(state.stuck) < _MAX_STUCK:
            state.link = StoreLink(
                state.path, niceness=self._niceness, start=self._starting.submit, integrity=self._integrity
            )
        return state.link

    @property
    def links(self) -> list[StoreLink]:
        """Live workers' links, to be polled."""
        return [state.link for state in self._stores.values() if state.link is not None]

    @property
    def busy(self) -> bool:
        """Whether any request is not answered yet that somebody waits for."""
        return any(state.at_work for state in self._stores.values())

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
        now = time.monotonic()
        state.spoke, state.problem = now, ""
        if not replies:
            state.heard = now  # part of one
        for reply in replies:
            one = state.pending.get(reply.id)
            if one is None or one.lane == MAIN:
                state.heard = now
            if one is None:
                continue
            one.heard(now)
            if not isinstance(reply, Progress):
                del state.pending[reply.id]
                if one.answer is not None:
                    one.answer(reply)
            elif one.progress is not None:
                one.progress(reply)
        self._settle(state)

    def _lose(self, state: _Store, problem: str) -> None:
        state.problem = problem
        for request_id, one in self._end(state).items():
            if one.answer is not None:
                one.answer(Failed(request_id, "worker", "", problem, ""))
        self._settle(state)

    @staticmethod
    def _end(state: _Store) -> dict[int, _Pending]:
        """Kills the worker. Returns what it had to do."""
        link, state.link = state.link, None
        if link is not None:
            link.kill()
            state.stuck.append(link)
        pending, state.pending = state.pending, {}
        return pending

    def next_deadline(self) -> float | None:
        """When tick must be called at the latest (time.monotonic)."""
        times = [p.deadline for s in self._stores.values() for p in s.pending.values() if p.deadline is not None]
        times += [s.heard + self._hang_s for s in self._stores.values() if s.at_work]
        return min(times, default=None)

    def tick(self) -> None:
        """Fails requests whose patience is over; replaces a worker that hangs."""
        now = time.monotonic()
        for state in list(self._stores.values()):
            for request_id, one in list(state.pending.items()):
                if one.deadline is not None and now >= one.deadline:
                    self._give_up(state, request_id, one)
            if state.at_work and now - state.heard >= self._hang_s:
                self._lose(state, f"{state.path} hangs: no word from its worker for {self._hang_s:g} s")
            self._settle(state)

    @staticmethod
    def _give_up(state: _Store, request_id: int, one: _Pending) -> None:
        answer, one.answer, one.deadline = one.answer, None, None
        if one.lane == MAIN:
            state.pending.pop(request_id, None)
        state.problem = f"{state.path} did not answer in time"
        if answer is not None:
            answer(Failed(request_id, "late", "", state.problem, "is the mount alive?"))

    def retire(self, store: str) -> None:
        """No job uses the store any more: its worker ends once it has answered everything."""
        state = self._stores.get(store)
        if state is not None:
            state.retired = True
            self._settle(state)

    def status(self) -> list[WorkerStatus]:
        """One line per store."""
        now = time.monotonic()
        return [
            WorkerStatus(
                store=s.path,
                pid=s.link.pid if s.link else 0,
                busy=len(s.pending),
                idle_s=round(now - (s.heard if s.at_work else s.spoke), 1) if s.spoke else 0.0,
                problem=s.problem,
            )
            for s in self._stores.values()
            if s.link is not None or s.problem
        ]

    def close(self) -> None:
        """Ends all workers without waiting for one that hangs."""
        for state in self._stores.values():
            self._end(state)
        for link in [link for state in self._stores.values() for link in state.stuck]:
            for _ in range(20):
                if link.poll() is not None:
                    break
                time.sleep(0.01)
        self._starting.shutdown(wait=False, cancel_futures=True)
