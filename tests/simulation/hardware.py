"""How long copies, threads and the store take: a while, by chance; or as long as bytes take on stated hardware."""

from dataclasses import dataclass, field

from ckptd.core import actions as act
from tests.simulation.clock import Clock

_COPY_S = 0.05
_READ_S = 0.1
_USUAL_S: dict[type[act.Action], float] = {
    act.AllocateSlots: 0.05, act.TakeDigests: 0.1, act.Encode: 0.3, act.FetchSegment: 0.2, act.Drain: 0.5,
    act.PullSegments: 0.2,
    act.TakeIncarnation: 0.01, act.ScanStore: 0.02, act.WriteVote: 0.02, act.Commit: 0.05,
    act.RemoveCheckpoint: 0.05, act.RemovePartial: 0.05,
    act.ScrubBlock: 0.05, act.CopyBlock: 0.1, act.ScrubPiece: 0.2, act.Mend: 0.2,
}  # fmt: skip


class Hardware:
    """Any: what is done takes about as long as usual, and rarely far longer. Results are seconds of virtual time."""

    def copy_s(self, clock: Clock) -> float:
        """Of a rank's state into its slot."""
        return clock.mostly(_COPY_S, 1.0)

    def read_s(self, clock: Clock) -> float:
        """Of a rank's load, from wherever it is sent."""
        return clock.mostly(_READ_S, 3.0)

    def action_s(self, clock: Clock, node: str, action: act.Action) -> float:
        """Of an action of the node's core."""
        usual = _USUAL_S[type(action)]
        return clock.mostly(usual, usual * 20)


@dataclass
class Measured(Hardware):
    """Nodes of one kind, each with so many ranks of ``nbytes`` each. Speeds are bytes/s: of one core, or of a node.

    What the thread that encodes does for a byte of its node's state takes ``encode_byte_s``, by ``SCHEME/MEMBERS``;
    meanwhile ``pulled`` bytes for each come in over the node's line. ``slower``: the share by which one action or copy
    may take longer than another, by chance.
    """

    nbytes: int
    ranks: int
    copy_bytes_per_s: float
    read_bytes_per_s: float
    digest_bytes_per_s: float
    encode_byte_s: dict[str, float]
    pulled: dict[str, float]
    line_bytes_per_s: float
    store_bytes_per_s: float  # of each node
    commit_s: float
    slower: float = 0.1
    _digests: dict[str, float] = field(
        default_factory=dict, init=False
    )  # node -> when its one thread of digests is free

    def _about(self, clock: Clock, seconds: float) -> float:
        return seconds * clock.between(1.0, 1.0 + self.slower)

    def copy_s(self, clock: Clock) -> float:
        return self._about(clock, self.nbytes / self.copy_bytes_per_s)

    def read_s(self, clock: Clock) -> float:
        return self._about(clock, self.nbytes / self.read_bytes_per_s)

    def action_s(self, clock: Clock, node: str, action: act.Action) -> float:
        match action:
            case act.TakeDigests():
                own = self._about(clock, self.nbytes / self.digest_bytes_per_s)
                self._digests[node] = max(clock.now, self._digests.get(node, 0.0)) + own
                return self._digests[node] - clock.now
            case act.Encode():
                kind = f"{action.chunk.scheme}/{len(action.chunk.columns)}"
                state = self.nbytes * self.ranks
                pull_s = state * self.pulled[kind] / self.line_bytes_per_s
                return self._about(clock, max(pull_s, state * self.encode_byte_s[kind]))
            case act.Drain():
                return self._about(clock, len(action.slots) * self.nbytes / self.store_bytes_per_s)
            case act.Commit():
                return self._about(clock, self.commit_s)
        return super().action_s(clock, node, action)
