"""Addresses at which nodes serve each other blocks of a checkpoint while a load runs. Pure."""

from collections.abc import Sequence
from typing import Annotated

import msgspec

MAX_PARTICIPANTS = 32  # nodes that read together: each holds connections to all others
MAX_EXCHANGES = 1024  # addresses in an order


class ExchangeAddress(msgspec.Struct, frozen=True, array_like=True):
    """An address, and the secret that proves membership of the job. It travels over authenticated links only."""

    host: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9.:_-]{1,255}\Z")]
    port: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
    secret: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]

    def __repr__(self) -> str:
        """Without the secret, because logs contain it."""
        return f"ExchangeAddress({self.host!r}, {self.port})"


def participants(
    exchanges: Sequence[tuple[int, ExchangeAddress]], ranks: Sequence[int]
) -> tuple[list[ExchangeAddress], int]:
    """Chooses the exchanges that read together with the node of these ranks; also gives that node's index among them.

    exchanges: of all nodes, by rank. Nodes form groups of MAX_PARTICIPANTS, in that order. No exchanges and -1 when the
    node has none, or its group has no other node.
    """
    own = next((index for index, (rank, _) in enumerate(exchanges) if rank in ranks), -1)
    first = own - own % MAX_PARTICIPANTS
    found = [exchange for _, exchange in exchanges[first : first + MAX_PARTICIPANTS]] if own >= 0 else []
    return (found, own - first) if len(found) > 1 else ([], -1)
