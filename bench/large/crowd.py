"""``python -m bench.large.crowd``: plays the nodes of a job that are not real, as its Plan and Commands say.

Reads a ``Plan``, writes its peers, then carries out one command after the other.
"""

import os
import sys
import time
from collections.abc import Callable

import zmq

from bench.large.members import Members
from bench.large.plan import Commands, Connect, Done, End, Load, Lose, Plan, Stage, node_name, read, write
from ckptd.shared.protocol.messages import Attached, LoadFrom

_ROUND_MS = 25


class Crowd:
    """Carries commands out while it serves the links."""

    def __init__(self) -> None:
        self.plan = read(sys.stdin, Plan)
        self.members = Members(self.plan)
        for number in range(self.plan.first, self.plan.first + self.plan.count):
            self.members.add(node_name(number))
        write(sys.stdout, [node.peer for node in self.members.nodes.values()])
        self._poller = zmq.Poller()
        self._poller.register(self.members.wire.router, zmq.POLLIN)
        self._poller.register(sys.stdin.fileno(), zmq.POLLIN)
        self._tiers: dict[str, int] = {}

    def serve(self) -> None:
        """Runs until its input ends."""
        while True:
            if sys.stdin.fileno() in self._turn():
                self._carry_out(read(sys.stdin, Commands))  # type: ignore[arg-type]

    def _turn(self) -> dict[int, int]:
        alive = self.members.wire.keep_alive
        alive.ends()
        ready = dict(self._poller.poll(_ROUND_MS))
        alive.begins(time.monotonic())
        self.members.turn()
        return {fd: flags for fd, flags in ready.items() if isinstance(fd, int)}

    def _carry_out(self, command: Commands) -> None:
        began, cpu, downs = time.monotonic(), time.process_time(), self.members.wire.downs
        self._tiers = {}
        match command:
            case Connect():
                self.members.attach(command)
                self._until(lambda: all((Attached, rank) in self.members.answers for rank in self.members.mine))
            case Stage(step=step):
                self.members.hand_over(step)
            case Load():
                self._load()
            case Lose(node=node, spare=spare):
                self.members.lose(node)
                self.members.add(spare)
            case End():
                self.members.end_ranks()
        wire = self.members.wire
        write(sys.stdout, Done(time.monotonic() - began, time.process_time() - cpu, wire.downs - downs, self._tiers))

    def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            self._turn()

    def _load(self) -> None:
        members, over = self.members, set[int]()
        members.ask_loads()
        while len(over) < len(members.mine):
            self._turn()
            for rank in members.mine:
                told = members.answers.pop((LoadFrom, rank), None)
                if not isinstance(told, LoadFrom):
                    continue
                if told.agreed or told.save is None:
                    over.add(rank)
                else:
                    self._tiers[told.tier] = self._tiers.get(told.tier, 0) + 1
                    members.come_out(rank, told)
            members.settle()


def main() -> None:
    """Runs the crowd; see the module."""
    try:
        Crowd().serve()
    except EOFError:
        os._exit(0)


if __name__ == "__main__":
    main()
