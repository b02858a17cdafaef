"""What a daemon's loop spends on what it does, in seconds of virtual time, and how large messages are.

The figures were measured on two busy cores with the real code: a packet with a message costs the loop of its receiver
112 to 131 us with its acknowledgement, a small order its sender 29 to 46 us, an idle link 52 us a second at a peer
timeout of 10 s (0.4 packets each way), a handshake 0.6 ms on each side. These agree with each other at 90 us for a
packet taken from the socket and 40 us for one handed to it. To decode a topology takes 36 ns a byte, a list of tiers
6 ns a byte; to encode one 1 to 5 ns a byte. Letters of bundles are in proportion to what ``bench.letters`` finds.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from ckptd.core import events as ev
from ckptd.shared.protocol import node_messages
from ckptd.shared.protocol.messages import Attach, encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds of one daemon's loop. A message from another node costs ``packet_in_s`` + ``packet_out_s`` = 130 us.

    ``rank_s``: a request of a rank, or a reply to it: a local socket has no CURVE, no envelope, no acknowledgement.
    ``local_s``: anything else of this node (a thread's result, a timer, an action of the core): the core's 8 to 34 us.
    """

    packet_in_s: float = 90e-6
    packet_out_s: float = 40e-6
    letter_in_s: float = 20e-6
    letter_out_s: float = 10e-6
    letter_on_s: float = 30e-6
    decode_byte_s: float = 40e-9
    encode_byte_s: float = 5e-9
    rank_s: float = 40e-6
    local_s: float = 20e-6
    handshake_s: float = 600e-6
    delay_s: float = 0.0002  # of a packet on its way
    bytes_per_s: float = 1.25e9  # in and out of a node: 10 Gbit/s
    peer_timeout_s: float = 10.0
    core: bool = False  # the CPU time of the core, as it is played here, is time of the loop too

    def local(self, event: ev.Event, sizes: "Sizes") -> float:
        """Of an event that did not come over a link."""
        if isinstance(event, ev.RankAttached):
            return self.rank_s + self.decode_byte_s * sizes.of_attach(event)
        return self.rank_s if getattr(event, "request", 0) else self.local_s

    def times(self, factor: float) -> "Costs":
        """Of a machine so many times slower."""
        names = [field.name for field in dataclasses.fields(self) if field.name.endswith(("_in_s", "_out_s", "_on_s"))]
        names += ["decode_byte_s", "encode_byte_s", "rank_s", "local_s", "handshake_s"]
        return dataclasses.replace(self, **{name: factor * getattr(self, name) for name in names})


class Sizes:
    """Bytes of messages by the real codec."""

    def __init__(self) -> None:
        self._last: tuple[Any, int] = (None, 0)  # an order to many nodes is one object

    def of(self, message: ev.Message) -> int:
        """Of a message between nodes."""
        if message is not self._last[0]:
            self._last = (message, len(node_messages.encode(message)))
        return self._last[1]

    @staticmethod
    def of_attach(event: ev.RankAttached) -> int:
        """Of what a rank says to its own daemon."""
        attach = Attach(
            seq=1, job=event.job, session=event.session, rank=event.rank, world_size=event.world_size,
            host=event.host, pid=event.pid, rendezvous=event.rendezvous,
        )  # fmt: skip
        return len(encode(attach))
