"""Ranks meet at a store of torch.distributed. Each rank puts a token there, a new one for each meeting.

A rank is counted once: by rank 0, which then owes it a verdict, or by the rank itself when it gives up. So rank 0 never
counts a rank that has given up, and no verdict belongs to another meeting.
"""

import contextlib
import uuid
from collections.abc import Sequence
from typing import Protocol

from ckptd.shared.base.errors import ConnectError
from ckptd_client._local.meeting import DECIDES_S, GRACE_S, MAX_WARNING_RANKS, AbsentError, not_all_came, turns


class Store(Protocol):
    """The methods of torch.distributed.Store that are used here."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def delete_key(self, key: str) -> bool: ...


def meet_at_store(store: Store, rank: int, world_size: int, seconds: float) -> str:
    """The name of the session, chosen by rank 0 once all ranks have come. Blocks. Raises ConnectError, RuntimeError."""
    token = uuid.uuid4().hex
    try:
        if rank:
            return _follow(store, rank, world_size, token, seconds)
        return _lead(store, world_size, token, seconds)
    except AbsentError as absent:
        raise not_all_came(absent.ranks, world_size, seconds) from None
    except BaseException:  # for example Ctrl-C: the next meeting must not find this token
        with contextlib.suppress(RuntimeError):
            store.add(f"counted/{token}", 1)
            store.delete_key(_here(rank))
        raise


def _here(rank: int) -> str:
    return f"here/{rank}"


def _lead(store: Store, world_size: int, token: str, seconds: float) -> str:
    """The part of rank 0. The first of rank 0 and the rank itself to add to its counter counts the rank."""
    store.set(_here(0), token)
    waiting = list(range(world_size - 1, 0, -1))
    for _ in turns(world_size, seconds, lambda: _absent(store, waiting)):
        while waiting and store.check([_here(waiting[-1])]):
            waiting.pop()
        if not waiting:
            break
    missing = _absent(store, waiting)
    gone = set(missing)
    tokens: dict[int, str] = {}
    for rank in (rank for rank in range(1, world_size) if rank not in gone):
        with contextlib.suppress(RuntimeError):  # it gave up and removed its token
            other = store.get(_here(rank)).decode() if store.check([_here(rank)]) else ""
            if other and store.add(f"counted/{other}", 1) == 1:
                tokens[rank] = other
    missing = [rank for rank in range(1, world_size) if rank not in tokens]
    session = "" if missing else uuid.uuid4().hex
    for key in (_here(rank) for rank in (0, *tokens)):
        store.delete_key(key)  # before the verdicts: the next meeting begins without them
    verdict = session or ",".join(map(str, missing))
    for other in tokens.values():
        store.set(f"verdict/{other}", f"{'met' if session else 'absent'}:{verdict}")
    if missing:
        raise AbsentError(missing)
    return session


def _follow(store: Store, rank: int, world_size: int, token: str, seconds: float) -> str:
    """The part of another rank."""
    verdict = f"verdict/{token}"
    store.set(_here(rank), token)

    def late() -> Sequence[int]:
        """The ranks to warn of: by rank 0 if it is there, else by the first ranks that wait for it."""
        lower = [_here(other) for other in range(1, min(rank, MAX_WARNING_RANKS))]
        warns = rank < MAX_WARNING_RANKS and not any(store.check([key]) for key in lower)
        return _absent(store, range(world_size)) if warns and not store.check([_here(0)]) else ()

    for _ in turns(world_size, seconds, late):
        if store.check([verdict]):
            return _session_of(store, verdict)
    missing = _absent(store, range(world_size))
    for _ in turns(world_size, GRACE_S, tuple):  # so that others, which check a moment later, do not miss this rank
        if store.check([verdict]):
            return _session_of(store, verdict)
    if store.add(f"counted/{token}", 1) == 1:
        store.delete_key(_here(rank))
        raise AbsentError(missing or [0])
    for _ in turns(world_size, DECIDES_S, tuple):
        if store.check([verdict]):
            return _session_of(store, verdict)
    raise ConnectError("rank 0 ended while all ranks met", hint="look at its output")


def _session_of(store: Store, verdict: str) -> str:
    kind, _, value = store.get(verdict).decode().partition(":")
    store.delete_key(verdict)
    if kind == "met":
        return value
    raise AbsentError([int(rank) for rank in value.split(",")])


def _absent(store: Store, ranks: Sequence[int]) -> list[int]:
    """The ranks that have not come."""
    if not ranks or store.check([_here(rank) for rank in ranks]):
        return []
    if len(ranks) == 1:
        return [*ranks]
    half = len(ranks) // 2
    return sorted([*_absent(store, ranks[:half]), *_absent(store, ranks[half:])])
