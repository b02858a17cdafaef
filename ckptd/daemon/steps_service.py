"""Answers which checkpoints could be restored. Only the coordinator of a job knows: elsewhere its daemon is asked."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from ckptd.core.jobs import Catalogue, Job
from ckptd.daemon import status
from ckptd.daemon.rank_socket import Incoming
from ckptd.peers.packets import MAX_CHECKPOINTS, StepsAsked, StepsKnown
from ckptd.peers.plane import PeerPlane
from ckptd.shared.base.errors import CkptdError, PeerError, RestoreError
from ckptd.shared.base.ids import JobKey
from ckptd.shared.protocol.messages import Refused, Reply, Steps
from ckptd.shared.protocol.status import CheckpointStatus

PATIENCE_S = 10.0  # of a rank; a daemon restarts within it
_PEER_PATIENCE_S = 8.0  # of another daemon: it must receive the reason before its rank has waited enough
_DOUBT_S = 3.0  # a coordinator that has just begun waits so long for store and nodes, before it says what it knows
_AGAIN_S = 1.0  # a question may be lost with a link
_MAX_QUESTIONS = 1 << 16  # of other daemons, at once; they ask again
QUERY_BITS = 52  # only the daemons that are asked know it, so an answer is theirs; packets take ids below 2**53

_Known = tuple[CheckpointStatus, ...]
_Outcome = _Known | CkptdError


@dataclass(slots=True)
class _Question:
    """One that is not answered yet. ``ours``: a rank of this node asked, so that another daemon may be asked."""

    job: JobKey
    answer: Callable[[_Outcome], None]
    ours: bool
    until: float  # then it is answered, come what may
    doubt_until: float
    due: float  # when to look at it again
    asked: str = ""  # the node that was asked last
    again_at: float = 0.0


class StepsService:
    """Nothing here blocks: ``tick`` answers what can be answered by now."""

    def __init__(
        self, node: str, catalogue: Catalogue, plane: PeerPlane, answer: Callable[[bytes, Reply], None]
    ) -> None:
        self._node = node
        self._catalogue = catalogue
        self._plane = plane
        self._answer = answer
        self._open: dict[tuple[str, int], _Question] = {}  # by the asking node ("": a rank here) and the question's id

    def asked(self, incoming: Incoming, job: JobKey, now: float) -> None:
        """AskSteps of a rank of the job."""

        def answer(outcome: _Outcome) -> None:
            seq = incoming.request.seq
            if isinstance(outcome, CkptdError):
                refusal = Refused(reply_to=seq, code=outcome.code, message=outcome.message, hint=outcome.hint)
                self._answer(incoming.identity, refusal)
            else:
                self._answer(incoming.identity, Steps(reply_to=seq, checkpoints=list(outcome)))

        self._add("", secrets.randbits(QUERY_BITS), job, answer, now)

    def hear(self, node: str, body: StepsAsked | StepsKnown, now: float) -> None:
        """A question or an answer of another daemon."""
        if isinstance(body, StepsKnown):
            question = self._open.get(("", body.id))
            if question is not None and question.asked == node:  # else too late
                del self._open["", body.id]
                question.answer(_refused_by(node, question.job, body.problem) if body.problem else body.checkpoints)
        elif len(self._open) < _MAX_QUESTIONS:
            self._add(node, body.id, body.job, lambda outcome: self._answer_node(node, body, outcome), now)

    def _add(self, who: str, number: int, job: JobKey, answer: Callable[[_Outcome], None], now: float) -> None:
        if (who, number) not in self._open:
            until = now + (_PEER_PATIENCE_S if who else PATIENCE_S)
            self._open[who, number] = _Question(job, answer, not who, until, now + _DOUBT_S, due=now)

    def _answer_node(self, node: str, asked: StepsAsked, outcome: _Outcome) -> None:
        if isinstance(outcome, CkptdError):
            self._plane.write(asked.job, node, StepsKnown(asked.id, problem=outcome.message[:4096]))
            return
        if len(outcome) > MAX_CHECKPOINTS:
            path = f"{asked.job.store}/{asked.job.job}"
            problem = (
                f"{len(outcome)} checkpoints are more than fit into one message: ckptd prune --keep-last 100 {path}"
            )
            self._plane.write(asked.job, node, StepsKnown(asked.id, problem=problem))
            return
        brief = tuple(msgspec.structs.replace(checkpoint, reason="") for checkpoint in outcome)
        self._plane.write(asked.job, node, StepsKnown(asked.id, brief))

    # --- what can be answered

    def tick(self, now: float) -> None:
        """Answers the questions that can be answered, and asks other daemons for the rest."""
        known: dict[JobKey, _Known] = {}  # at this moment: to list it takes a coordinator of 1,000 nodes milliseconds
        for place, question in list(self._open.items()):
            job = self._catalogue.jobs.get(question.job)
            if job is not None and job.node.coordinator == self._node:
                outcome = _known_here(question, job, known, now)
            else:
                outcome = self._known_elsewhere(place[1], question, job, now)
            if outcome is not None:
                del self._open[place]
                question.answer(outcome)

    def next_deadline(self) -> float | None:
        """When tick must be called at the latest."""
        return min((question.due for question in self._open.values()), default=None)

    def _known_elsewhere(self, number: int, question: _Question, job: Job | None, now: float) -> CkptdError | None:
        coordinator = job.node.coordinator if job is not None else ""
        if now >= question.until:
            return _silent(coordinator, question.job)
        if question.ours and coordinator and (now >= question.again_at or question.asked != coordinator):
            question.asked, question.again_at = coordinator, now + _AGAIN_S
            self._plane.write(question.job, coordinator, StepsAsked(number, question.job))
        question.due = min(question.until, question.again_at) if question.ours and coordinator else question.until
        return None


def _known_here(question: _Question, job: Job, known: dict[JobKey, _Known], now: float) -> _Outcome | None:
    """Of the job's coordinator. An empty list is said only of a job that has nothing."""
    doubt = _doubt(question.job, job)
    if doubt and now < question.doubt_until:
        question.due = question.doubt_until
        return None
    if question.job not in known:
        known[question.job] = tuple(c for c in status.checkpoints(job, now) if c.tiers)
    if known[question.job] or not doubt:
        return known[question.job]
    question.due = question.until
    if now < question.until:
        return None
    text = f"it is not known which steps of job {question.job.job} can be restored: {doubt}"
    return RestoreError(text, hint="ckptd status --nodes says what does not answer, ckptd doctor what to do")


def _doubt(key: JobKey, job: Job) -> str:
    """What a coordinator that has just begun may not know yet; empty: it knows all."""
    if not job.coordinator.facts.ready:
        return f"store {key.store} has not answered"
    if not job.coordinator.inventory.complete:
        return "not every node has said what it has in memory"
    return ""


def _silent(coordinator: str, job: JobKey) -> CkptdError:
    if not coordinator:
        return RestoreError(f"this daemon has nothing of job {job.job} any more", hint="connect again")
    text = f"node {coordinator}, which coordinates job {job.job}, did not answer within {PATIENCE_S:g} s: only it knows"
    hint = f"ckptd status --nodes; if its daemon is gone, start ckptd on {coordinator} again, or start the job again"
    return PeerError(f"{text} which steps can be restored", hint=hint)


def _refused_by(node: str, job: JobKey, problem: str) -> PeerError:
    return PeerError(f"node {node}, which coordinates job {job.job}, answers: {problem}", hint="ckptd status --nodes")
