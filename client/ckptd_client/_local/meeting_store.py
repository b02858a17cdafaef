"""Ranks that meet at a store of torch.distributed's. Each rank that comes leaves its token there, new for each meeting.

A rank is counted once: by rank 0, which then owes it a verdict, or by the rank itself as it gives up. So no rank is
counted that is not there any more, and no verdict is for another meeting.
"""

import contextlib
import uuid
from collections.abc import Sequence
from typing import Protocol

from ckptd.shared.base.errors import ConnectError
from ckptd_client._local.meeting import DECIDES_S, GRACE_S, SPEAKERS, AbsentError, not_all_came, turns


class Store(Protocol):
    """What is used of a torch.distributed.Store."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def delete_key(self, key: str) -> bool: ...


def meet_at_store(store: Store, rank: int, world_size: int, seconds: float) -> str:
    """The session's name, drawn by rank 0, once all ranks have come. Blocks. Raises ConnectError, RuntimeError."""
    token = uuid.uuid4().hex
    try:
        if rank:
            return _come(store, rank, world_size, token, seconds)
        return _gather(store, world_size, token, seconds)
    except AbsentError as absent:
        raise not_all_came(absent.ranks, world_size, seconds) from None
    except BaseException:  # Ctrl-C, say: whoever comes again finds no word of this meeting
        with contextlib.suppress(RuntimeError):
            store.add(f"counted/{token}", 1)
            store.delete_key(_here(rank))
        raise


def _here(rank: int) -> str:
    return f"here/{rank}"


def _gather(store: Store, world_size: int, token: str, seconds: float) -> str:
    """Rank 0's part. A rank is counted once, by whoever is first to add: rank 0, or the rank itself as it gives up."""
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
        with contextlib.suppress(RuntimeError):  # it gave up, and took its word back
            word = store.get(_here(rank)).decode() if store.check([_here(rank)]) else ""
            if word and store.add(f"counted/{word}", 1) == 1:
                tokens[rank] = word
    missing = [rank for rank in range(1, world_size) if rank not in tokens]
    session = "" if missing else uuid.uuid4().hex
    for key in (_here(rank) for rank in (0, *tokens)):
        store.delete_key(key)  # before they hear of it: the next meeting begins with none
    verdict = session or ",".join(map(str, missing))
    for word in tokens.values():
        store.set(f"verdict/{word}", f"{'met' if session else 'absent'}:{verdict}")
    if missing:
        raise AbsentError(missing)
    return session


def _come(store: Store, rank: int, world_size: int, token: str, seconds: float) -> str:
    """Another rank's part."""
    verdict = f"verdict/{token}"
    store.set(_here(rank), token)

    def late() -> Sequence[int]:
        """Rank 0 says it, if it is there; else the first ranks that wait for it."""
        lower = [_here(other) for other in range(1, min(rank, SPEAKERS))]
        speaks = rank < SPEAKERS and not any(store.check([key]) for key in lower)
        return _absent(store, range(world_size)) if speaks and not store.check([_here(0)]) else ()

    for _ in turns(world_size, seconds, late):
        if store.check([verdict]):
            return _heard(store, verdict)
    missing = _absent(store, range(world_size))
    for _ in turns(world_size, GRACE_S, tuple):  # nor do the others miss this one, which take stock a moment later
        if store.check([verdict]):
            return _heard(store, verdict)
    if store.add(f"counted/{token}", 1) == 1:
        store.delete_key(_here(rank))
        raise AbsentError(missing or [0])
    for _ in turns(world_size, DECIDES_S, tuple):
        if store.check([verdict]):
            return _heard(store, verdict)
    raise ConnectError("rank 0 ended while all ranks met", hint="look at its output")


def _heard(store: Store, verdict: str) -> str:
    kind, _, said = store.get(verdict).decode().partition(":")
    store.delete_key(verdict)
    if kind == "met":
        return said
    raise AbsentError([int(rank) for rank in said.split(",")])


def _absent(store: Store, ranks: Sequence[int]) -> list[int]:
    """Those of the ranks that have not come."""
    if not ranks or store.check([_here(rank) for rank in ranks]):
        return []
    if len(ranks) == 1:
        return [*ranks]
    half = len(ranks) // 2
    return sorted([*_absent(store, ranks[:half]), *_absent(store, ranks[half:])])
