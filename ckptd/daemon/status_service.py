"""Answers questions for the status: of the command line, and of the daemons of other nodes."""

import os
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from ckptd import __version__
from ckptd.arena.arena import Arena
from ckptd.core.jobs import Catalogue, Job
from ckptd.daemon import status as builder
from ckptd.daemon.pace import Pace
from ckptd.daemon.rank_socket import Incoming
from ckptd.daemon.status_query import (
    SAID_S,
    Answer,
    StatusQuery,
    ahead_s,
    decode_answer,
    encode_answer,
    joined,
    progressed,
)
from ckptd.daemon.steps_service import QUERY_BITS, StepsService
from ckptd.history.account import Account
from ckptd.peers.packets import Answered, Ask, StepsAsked, StepsKnown
from ckptd.peers.plane import PeerPlane
from ckptd.shared.base.errors import ProtocolError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.protocol.messages import AskStatus, Reply, StatusReply
from ckptd.shared.protocol.status import MAX_PROBLEMS, SCHEMA, JobStatus, NodeReport, Status
from ckptd.store.workers import Stores

MAX_ERRORS = 20
_MAX_OWN = 10  # of them, with room for what strangers cause
_MAX_SURVEYS = 64  # at once; a question beyond that is answered for this node alone
_MAX_CHARS = 4096  # of an error that travels
_SEND_AGAIN_S = 0.02  # while the link to a node comes up
_ASK_AGAIN_S = 0.002  # for each node, between two questions for its progress: so they cost little of the loop


Drain = tuple[JobKey, SaveId]


@dataclass(frozen=True, slots=True)
class Sources:
    """What a status is read off."""

    node: str
    arena: Arena
    catalogue: Catalogue
    stores: Stores
    plane: PeerPlane
    pace: Pace
    account: Callable[[JobKey], Account | None]  # of a job, by its journal
    refused: Callable[[], int]  # frames of ranks that were no message
    problems: Callable[[], list[str]]  # what is wrong with the bulk plane, a line each


@dataclass(slots=True)
class _Waiting:
    """A letter whose answer waits for other nodes."""

    incoming: Incoming
    query: StatusQuery
    whole: bool  # the reports of the nodes are wanted, too
    jobs: dict[int, JobKey] = field(default_factory=dict)  # id of the question -> what was asked
    drains: dict[JobKey, Drain] = field(default_factory=dict)  # that ran when it was asked
    asked_at: float = field(default_factory=time.time)
    unsent: list[tuple[int, str]] = field(default_factory=list)  # question and node: there is no link yet


class StatusService:
    """Keeps the last errors. Nothing here blocks: a query's answer is sent when ``tick`` finds it over."""

    def __init__(self, sources: Sources, answer: Callable[[bytes, Reply], None]) -> None:
        self._from = sources
        self._answer = answer
        self._steps = StepsService(sources.node, sources.catalogue, sources.plane, answer)
        self._started, self._began_at = time.monotonic(), round(time.time(), 3)
        self._waiting: list[_Waiting] = []
        self._said: dict[JobKey, tuple[float, bytes]] = {}  # to other daemons, and when
        self._progress: dict[Drain, tuple[float, dict[str, NodeReport]]] = {}  # when it was asked for, and found
        self.errors: dict[JobKey, list[str]] = {}
        self.own: deque[str] = deque(maxlen=MAX_ERRORS)  # what concerns no job

    def note(self, job: JobKey, text: str) -> None:
        """Remembers what went wrong with a job. The same again is said once, as the newest."""
        errors = self.errors.setdefault(job, [])
        if text in errors:
            errors.remove(text)
        errors.append(text)
        del errors[:-MAX_ERRORS]

    # --- ranks and the command line

    def steps(self, incoming: Incoming, job: JobKey) -> None:
        """AskSteps: checkpoints that a rank could restore, or why they are not known."""
        self._steps.asked(incoming, job, time.monotonic())

    def asked(self, incoming: Incoming) -> None:
        """AskStatus: answered now, or once the other nodes have answered."""
        request = incoming.request
        whole = isinstance(request, AskStatus) and request.nodes
        others = {key: self._others(job, whole=whole) for key, job in self._from.catalogue.jobs.items()}
        if not (whole or any(others.values())) or len(self._waiting) >= _MAX_SURVEYS:
            self._answer(incoming.identity, StatusReply(reply_to=request.seq, status=self._with_progress()))
            return
        waiting = _Waiting(incoming, StatusQuery(others, time.monotonic()), whole)
        for key, nodes in others.items():
            question = secrets.randbits(QUERY_BITS)
            waiting.jobs[question] = key
            if (record := builder.draining(self._from.catalogue.jobs[key])) is not None:
                waiting.drains[key] = key, record.save
            for node in nodes:
                if self._from.plane.write(key, node, Ask(question, key)):
                    continue
                if self._from.plane.call(key, node):
                    waiting.unsent.append((question, node))
                else:
                    waiting.query.unasked(key, node)
        if waiting.unsent:
            waiting.query.calls()
        self._waiting.append(waiting)

    def _send(self, waiting: _Waiting) -> None:
        """Questions to nodes whose links have come up."""
        left, keys = waiting.unsent, waiting.jobs
        waiting.unsent = [(q, node) for q, node in left if not self._from.plane.write(keys[q], node, Ask(q, keys[q]))]

    def _others(self, job: Job, *, whole: bool) -> list[str]:
        """Nodes to ask about the job: all of them, or those that write to the store now, for their progress."""
        if whole:
            return [node for node in job.node.membership.nodes if node != self._from.node]
        record = builder.draining(job)
        if record is None:
            return []
        writing = builder.drainers(job)
        asked_at, _ = self._progress.get((job.node.job, record.save), (float("-inf"), {}))
        return writing if time.monotonic() >= asked_at + _ASK_AGAIN_S * len(writing) else []

    # --- other daemons

    def read_mail(self) -> None:
        """Answers what other daemons ask, and takes in what they tell."""
        for mail in self._from.plane.take_mail():
            match mail.body:
                case Ask(job=key):
                    job = self._from.catalogue.jobs.get(key)
                    if job is not None:
                        self._from.plane.write(key, mail.node, Answered(mail.body.id, self._answer_about(key, job)))
                case Answered():
                    self._told(mail.node, mail.body)
                case StepsAsked() | StepsKnown():
                    self._steps.hear(mail.node, mail.body, time.monotonic())

    def _told(self, node: str, told: Answered) -> None:
        waiting = next((one for one in self._waiting if told.id in one.jobs), None)
        if waiting is None:
            return  # too late
        try:
            answer = decode_answer(told.answer)
        except ProtocolError:
            self._from.plane.refused["malformed"] += 1
            return
        ahead = ahead_s(answer.report.clock, waiting.asked_at, time.time())
        answer = msgspec.structs.replace(answer, report=msgspec.structs.replace(answer.report, ahead_s=ahead))
        waiting.query.told(waiting.jobs[told.id], node, answer, time.monotonic())

    def _answer_about(self, key: JobKey, job: Job) -> bytes:
        """Encoded, the same for all that ask at once: to encode 1,000 nodes takes a coordinator 40 ms."""
        now = time.monotonic()
        self._said = {job: said for job, said in self._said.items() if now < said[0] + SAID_S}
        if key not in self._said:
            self._said[key] = now, encode_answer(self._answer_of(key, job))
        return self._said[key][1]

    def _answer_of(self, key: JobKey, job: Job) -> Answer:
        whole = None
        if job.node.coordinator == self._from.node:
            (whole,) = builder.jobs({key: job}, time.monotonic(), {}, self._from.account)
            whole = msgspec.structs.replace(whole, ranks=[])
        return Answer(report=self._report(key, job), job=whole)

    def _report(self, key: JobKey, job: Job) -> NodeReport:
        """This node, as far as the job is concerned."""
        workers = [worker for worker in self._from.stores.status() if worker.store == key.store]
        of_store = [worker.problem or (f"{key.store} gives no answer" if worker.silent else "") for worker in workers]
        problems = [*filter(None, of_store), *self.errors.get(key, []), *self._problems()]
        return NodeReport(
            version=__version__,
            pid=os.getpid(),
            uptime_s=self._uptime_s,
            budget_nbytes=self._from.arena.budget_nbytes(),
            used_nbytes=self._from.arena.used_nbytes,
            tightest_limit=self._from.arena.budget().tightest.name,
            ranks=builder.ranks(job),
            problems=[problem[:_MAX_CHARS] for problem in problems[:MAX_PROBLEMS]],
            clock=time.time(),
        )

    # --- the answer

    def tick(self, now: float) -> None:
        """Answers the questions whose query is over, and those for steps that are known by now."""
        self._steps.tick(now)
        for waiting in self._waiting:
            self._send(waiting)
        for waiting in [one for one in self._waiting if one.query.over(now)]:
            self._waiting.remove(waiting)
            status = self._answered(waiting)
            self._answer(waiting.incoming.identity, StatusReply(reply_to=waiting.incoming.request.seq, status=status))

    def next_deadline(self) -> float | None:
        """When tick must be called at the latest."""
        soon = time.monotonic() + _SEND_AGAIN_S
        queries = [min(one.query.deadline, soon) if one.unsent else one.query.deadline for one in self._waiting]
        return min((due for due in (*queries, self._steps.next_deadline()) if due is not None), default=None)

    @property
    def _uptime_s(self) -> float:
        return round(time.monotonic() - self._started, 3)

    def _problems(self) -> list[str]:
        return [*list(self.own)[-_MAX_OWN:], *self._from.problems(), *self._from.plane.problems()][:MAX_ERRORS]

    def _answered(self, waiting: _Waiting) -> Status:
        query, now = waiting.query, time.monotonic()
        for key, answers in query.answers.items():
            if query.asked[key] and key in waiting.drains:
                self._progress[waiting.drains[key]] = now, {node: answer.report for node, answer in answers.items()}
        if not waiting.whole:
            return self._with_progress()
        status = self.status()
        return msgspec.structs.replace(status, jobs=[self._joined(job, query) for job in status.jobs])

    def _with_progress(self) -> Status:
        """The status, with what nodes said last of the drains that run."""
        status = self.status()
        running = {(JobKey(job.store, job.job), job.drain.save) for job in status.jobs if job.drain is not None}
        self._progress = {drain: found for drain, found in self._progress.items() if drain in running}
        found = {key: reports for (key, _), (_, reports) in self._progress.items()}
        jobs = [progressed(job, found.get(JobKey(job.store, job.job), {})) for job in status.jobs]
        return msgspec.structs.replace(status, jobs=jobs)

    def _joined(self, own: JobStatus, query: StatusQuery) -> JobStatus:
        key = JobKey(own.store, own.job)
        return joined(own, self._from.node, self._report(key, self._from.catalogue.jobs[key]), query)

    def status(self) -> Status:
        """Everything that this daemon knows of itself."""
        arena = self._from.arena
        return Status(
            schema=SCHEMA,
            version=__version__,
            node=self._from.node,
            pid=os.getpid(),
            arena=arena.path,
            uptime_s=self._uptime_s,
            budget_nbytes=arena.budget_nbytes(),
            used_nbytes=arena.used_nbytes,
            tightest_limit=arena.budget().tightest.name,
            jobs=builder.jobs(self._from.catalogue.jobs, time.monotonic(), self.errors, self._from.account),
            workers=self._from.stores.status(),
            refused_messages=self._from.refused() + self._from.plane.refused.total(),
            errors=self._problems(),
            long_turns=self._from.pace.long,
            longest_turn_s=round(self._from.pace.longest_s, 4),
            began_at=self._began_at,
        )
