"""Ranks meet by non-blocking MPI messages: a collective or a receive would never end if a rank is missing.

Once all have come, rank 0 asks each rank whether it still waits; then it sends the session. Each meeting has new
tokens, so that messages of a failed meeting do not affect the next one.
"""

import uuid
from collections.abc import Iterator
from typing import Any

from ckptd.shared.base.errors import ConnectError
from ckptd_client._local.meeting import DECIDES_S, GRACE_S, MAX_WARNING_RANKS, AbsentError, not_all_came, turns

_TO_ZERO, _FROM_ZERO = 21345, 21346  # tags
_sent: list[Any] = []  # requests that MPI may not have completed


def meet_by_messages(mpi: Any, world: Any, seconds: float) -> str:
    """The name of the session, chosen by rank 0 once all ranks have come. Blocks. Raises ConnectError.

    mpi: mpi4py's module; world: its communicator of all ranks.
    """
    rank, world_size = world.Get_rank(), world.Get_size()
    messages = _Messages(mpi, world)
    try:
        if rank:
            return _Follower(messages, rank, world_size).meet(seconds)
        return _Leader(messages, world_size).meet(seconds)
    except AbsentError as absent:
        raise not_all_came(absent.ranks, world_size, seconds) from None


class _Messages:
    """Small messages between rank 0 and the others."""

    def __init__(self, mpi: Any, world: Any) -> None:
        self._mpi, self._world = mpi, world

    def send(self, to: int, *values: str) -> None:
        _sent[:] = [request for request in _sent if not request.test()[0]]
        _sent.append(self._world.isend(values, dest=to, tag=_FROM_ZERO if to else _TO_ZERO))

    def received(self) -> Iterator[tuple[int, tuple[str, ...]]]:
        """The messages that have arrived, each with its sender."""
        zero = self._world.Get_rank() == 0
        source, tag = (self._mpi.ANY_SOURCE, _TO_ZERO) if zero else (0, _FROM_ZERO)
        status = self._mpi.Status()
        while (found := self._world.improbe(source=source, tag=tag, status=status)) is not None:
            sender = int(status.Get_source())
            yield sender, tuple(found.recv())


class _Leader:
    """Rank 0."""

    def __init__(self, messages: _Messages, world_size: int) -> None:
        self._messages, self._world_size = messages, world_size
        self._came: dict[int, str] = {}  # their tokens
        self._asked: dict[int, str] = {}
        self._stays: dict[int, str] = {}

    def meet(self, seconds: float) -> str:
        for _ in turns(self._world_size, seconds, self._missing):
            if self._all_stay():
                break
        for _ in turns(self._world_size, 0.0 if self._missing() else GRACE_S, tuple):  # the last rank has just come
            if self._all_stay():
                break
        absent = self._missing() or sorted(self._came.keys() - self._stays.keys())
        session = "" if absent else uuid.uuid4().hex
        for rank, token in self._came.items():
            self._messages.send(rank, *(["absent", token, *map(str, absent)] if absent else ["met", token, session]))
        if absent:
            raise AbsentError(absent)
        return session

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self._world_size) if rank not in self._came]

    def _all_stay(self) -> bool:
        """Whether all ranks have come and still wait; asks the ranks that have not confirmed it."""
        self._listen()
        if len(self._came) < self._world_size - 1:
            return False
        for rank, token in self._came.items():
            if self._asked.get(rank) != token:
                self._asked[rank] = token
                self._messages.send(rank, "ask", token)
        return self._stays == self._came

    def _listen(self) -> None:
        for rank, (kind, token) in self._messages.received():
            if kind == "here":
                self._came[rank] = token
                self._stays.pop(rank, None)
                self._messages.send(rank, "wait", token)
            elif self._came.get(rank) != token:
                continue  # of a failed meeting
            elif kind == "gone":
                del self._came[rank]
                self._stays.pop(rank, None)
            else:
                self._stays[rank] = token


class _Follower:
    """Any other rank. Once rank 0 has answered, it waits for the verdict."""

    def __init__(self, messages: _Messages, rank: int, world_size: int) -> None:
        self._messages, self._world_size = messages, world_size
        self._warns = rank < MAX_WARNING_RANKS
        self._token = uuid.uuid4().hex
        self._answered = False

    def meet(self, seconds: float) -> str:
        self._messages.send(0, "here", self._token)
        try:
            session = self._wait(seconds + GRACE_S) or (self._wait(seconds + DECIDES_S) if self._answered else "")
        except BaseException:  # also Ctrl-C: rank 0 must not count it
            self._messages.send(0, "gone", self._token)
            raise
        if session:
            return session
        self._messages.send(0, "gone", self._token)
        if self._answered:
            raise ConnectError("rank 0 ended while all ranks met", hint="look at its output")
        raise AbsentError([0])

    def _wait(self, seconds: float) -> str:
        for _ in turns(self._world_size, seconds, lambda: (0,) if self._warns and not self._answered else ()):
            if session := self._listen():
                return session
        return ""

    def _listen(self) -> str:
        for _, (kind, token, *reported) in self._messages.received():
            if token != self._token:
                continue  # of a failed meeting
            self._answered = True
            if kind == "ask":
                self._messages.send(0, "still", token)
            elif kind == "absent":
                raise AbsentError([int(rank) for rank in reported])
            elif kind == "met":
                return reported[0]
        return ""
