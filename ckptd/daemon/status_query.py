"""One query to the daemons of all nodes of some jobs, for a status: the asked nodes, their answers, the result.

Pure: what is asked and when it is over is decided here, ``ckptd/daemon/status_service.py`` sends and listens.
"""

from collections.abc import Iterable, Mapping

import msgspec

from ckptd.shared.base.decoding import decoded
from ckptd.shared.base.errors import ProtocolError
from ckptd.shared.base.ids import JobKey
from ckptd.shared.protocol.status import DrainStatus, JobStatus, NodeReport, NodeStatus

PATIENCE_S = 0.7  # with nodes that do not answer
SAID_S = 0.5  # how old an answer to another daemon may be
_CALL_S = 0.5  # more, with those to which there is no link yet
_CROWD_S = 0.5  # of nodes that still answer: so long after the last answer
_MOST_S = 3.0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a daemon sends to another one. job: the whole picture of it, from the node that coordinates it."""

    report: NodeReport
    job: JobStatus | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode_answer(answer: Answer) -> bytes:
    """For ``Answered``."""
    return _encoder.encode(answer)


def decode_answer(raw: bytes) -> Answer:
    """Raises ProtocolError for what is none."""
    return decoded(_decoder.decode, raw, "malformed answer of a node", ProtocolError)


class StatusQuery:
    """Over when everybody has answered, or nobody has for a while."""

    def __init__(self, asked: Mapping[JobKey, Iterable[str]], now: float) -> None:
        self.asked = {job: tuple(nodes) for job, nodes in asked.items()}
        self.answers: dict[JobKey, dict[str, Answer]] = {job: {} for job in self.asked}
        self._left = {(job, node) for job, nodes in self.asked.items() for node in nodes}
        self._end = now + _MOST_S
        self.deadline = now + PATIENCE_S

    def calls(self) -> None:
        """Links to nodes that are asked are to come up first."""
        self.deadline += _CALL_S

    def unasked(self, job: JobKey, node: str) -> None:
        """The question cannot be sent there: nothing is waited for."""
        self._left.discard((job, node))

    def told(self, job: JobKey, node: str, answer: Answer, now: float) -> None:
        """An answer, in time or not."""
        if (job, node) in self._left:
            self._left.discard((job, node))
            self.answers[job][node] = answer
            self.deadline = min(self._end, max(self.deadline, now + _CROWD_S))

    def over(self, now: float) -> bool:
        """Whether nothing more is waited for."""
        return not self._left or now >= self.deadline


def ahead_s(clock: float, asked: float, answered: float) -> float | None:
    """How far the clock of an answer is ahead of this node's: what the time of question and answer cannot explain.

    All are seconds since 1970. An answer may have been made a moment before the question: it is the same for all that
    ask at once. None: it does not say.
    """
    if not clock:
        return None
    if clock > answered:
        return round(clock - answered, 3)
    return round(min(0.0, clock - (asked - SAID_S)), 3)


def joined(own: JobStatus, here: str, report: NodeReport, query: StatusQuery) -> JobStatus:
    """The whole job: what its coordinator knows, and of each node what its daemon said of itself.

    own, here, report: of the daemon that was asked. What its ranks hold and its errors stay its own.
    """
    job = JobKey(own.store, own.job)
    answers = query.answers.get(job, {})
    whole = answers[own.coordinator].job if own.coordinator in answers else None
    base = whole if whole is not None and (whole.store, whole.job) == (own.store, own.job) else own
    reports = {here: report} | {node: answer.report for node, answer in answers.items()}
    base = progressed(base, reports)
    return msgspec.structs.replace(
        base,
        ranks=own.ranks,
        errors=own.errors,
        nodes=[msgspec.structs.replace(node, report=reports.get(node.node)) for node in base.nodes],
        silent=[node for node in query.asked.get(job, ()) if node not in answers],
    )


def progressed(job: JobStatus, reports: Mapping[str, NodeReport]) -> JobStatus:
    """The job and its drain, with the bytes that nodes report as written: each node knows its own and no others'."""
    if job.drain is None:
        return job
    nodes = [_with_ranks(node, reports.get(node.node)) for node in job.nodes]
    came = sum(node.drain_nbytes_done for node in nodes) - sum(node.drain_nbytes_done for node in job.nodes)
    return msgspec.structs.replace(job, nodes=nodes, drain=_further(job.drain, came) if came else job.drain)


def _further(drain: DrainStatus, nbytes: int) -> DrainStatus:
    done = min(drain.nbytes_done + nbytes, drain.nbytes)
    rate = done / max(drain.seconds, 1e-6)
    left = round((drain.nbytes - done) / rate, 3)
    return msgspec.structs.replace(drain, nbytes_done=done, bytes_per_s=round(rate, 1), seconds_left=left)


def _with_ranks(node: NodeStatus, report: NodeReport | None) -> NodeStatus:
    if report is None:
        return node
    done = sum(rank.drain_nbytes_done for rank in report.ranks)
    return msgspec.structs.replace(node, drain_nbytes_done=min(node.drain_nbytes, max(node.drain_nbytes_done, done)))
