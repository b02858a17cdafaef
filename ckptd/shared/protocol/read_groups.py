"""Where a node's ranks serve the job's other nodes what they read of a checkpoint, for the time of a load. Pure."""

from collections.abc import Sequence
from typing import Annotated

import msgspec

MAX_COMPANY = 32  # nodes that read together: each holds connections to all others
MAX_GATES = 1024  # that an order carries


class Gate(msgspec.Struct, frozen=True, array_like=True):
    """An address, and the secret that proves to be of the job. It travels over authenticated links only."""

    host: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9.:_-]{1,255}\Z")]
    port: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
    secret: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]

    def __repr__(self) -> str:
        """Without the secret: it goes into logs."""
        return f"Gate({self.host!r}, {self.port})"


def company(gates: Sequence[tuple[int, Gate]], ranks: Sequence[int]) -> tuple[list[Gate], int]:
    """Of the gates of all nodes, by rank, those that read together with the node of these ranks, and which is its own.

    Nodes in the order of their gates' ranks, MAX_COMPANY to a company. No gates and -1 when it has no gate, or no
    company.
    """
    own = next((index for index, (rank, _) in enumerate(gates) if rank in ranks), -1)
    first = own - own % MAX_COMPANY
    found = [gate for _, gate in gates[first : first + MAX_COMPANY]] if own >= 0 else []
    return (found, own - first) if len(found) > 1 else ([], -1)
