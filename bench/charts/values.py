"""The constants of the simulated nodes: those that are stated, and those that are measured."""

from dataclasses import asdict, dataclass
from typing import Any

from tests.simulation.costs import Costs
from tests.simulation.hardware import Measured
from tests.simulation.scale import RANKS


@dataclass(frozen=True, slots=True)
class Stated:
    """What is not measured. nbytes: state of a rank. Speeds in bytes/s, of a node."""

    nbytes: int = 1 << 30
    tensors: int = 300  # of a rank
    line_bytes_per_s: float = 12.5e9
    store_bytes_per_s: float = 2e9
    slower: float = 0.1


@dataclass(frozen=True, slots=True)
class Constants:
    """What is measured. Speeds in bytes per CPU second.

    ``encode``, ``pulled``: of a byte of state, by "SCHEME/MEMBERS". ``commit``: seconds, by the number of nodes.
    """

    packet_in_s: float
    packet_out_s: float
    decode_byte_s: float
    encode_byte_s: float
    copy_bytes_per_s: float
    read_bytes_per_s: float
    digest_bytes_per_s: float
    commit: dict[str, float]
    encode: dict[str, float]
    pulled: dict[str, float]

    @property
    def costs(self) -> Costs:
        """Of a daemon's loop. What the core takes is measured in the play itself."""
        return Costs(
            core=True,
            packet_in_s=self.packet_in_s,
            packet_out_s=self.packet_out_s,
            decode_byte_s=self.decode_byte_s,
            encode_byte_s=self.encode_byte_s,
        )

    def hardware(self, stated: Stated, nodes: int) -> Measured:
        """Of one job of so many nodes."""
        return Measured(
            nbytes=stated.nbytes,
            ranks=RANKS,
            copy_bytes_per_s=self.copy_bytes_per_s,
            read_bytes_per_s=self.read_bytes_per_s,
            digest_bytes_per_s=self.digest_bytes_per_s,
            encode_byte_s=self.encode,
            pulled=self.pulled,
            line_bytes_per_s=stated.line_bytes_per_s,
            store_bytes_per_s=stated.store_bytes_per_s,
            commit_s=self.commit[str(nodes)],
            slower=stated.slower,
        )

    def rounded(self) -> "Constants":
        """With four digits of each."""
        return Constants(**{name: _rounded(value) for name, value in asdict(self).items()})


def _rounded(value: Any) -> Any:
    return {key: _rounded(one) for key, one in value.items()} if isinstance(value, dict) else float(f"{value:.4g}")
