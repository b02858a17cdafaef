"""Ranks that need images of others, on nodes whose memory is full: the newest goes to the store, to be read there."""

from collections import Counter
from typing import Any

import pytest

from ckptd.core.coordinator.restore_states import Loading
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.schemes import Scheme
from tests.simulation.run import examine
from tests.simulation.shared import once_in_all
from tests.simulation.world import World
from tests.states import reached

LONG_S = 400.0  # a play has this much for whatever comes next
SLOW, CRAWLS = 3000.0, 300.0  # bytes per second of a store: a drain takes 20 s, or longer than a load waits


class Play:
    """A job whose newest checkpoint lies in memory alone when its ranks die, and that starts again with all full."""

    def __init__(self, seed: int, bytes_per_s: float) -> None:
        self.world = World(seed, 3, scheme=Scheme.XOR, set_size=3, fault_every_s=0.0, shared=0.0, relaid=1.0)
        self.launcher = self.world.launchers[0]
        self.store = self.world.store(self.launcher.job)
        self.world.begin()
        self.until(lambda: self.store.committed)
        self.store.bytes_per_s = bytes_per_s
        self.world.run(30.0)
        first = self.launcher.current
        first.crash(first.procs)
        self.until(lambda: self.session not in (first, None) and self.session.phase == "load")
        self.world.chaos.note("memory full")
        for machine in self.world.nodes.values():
            machine.arena.budget_nbytes = machine.arena.used_nbytes
        self.until(lambda: self.loading is Loading.DRAINING)

    @property
    def session(self) -> Any:
        """The one that runs."""
        return self.launcher.current

    def until(self, done: Any) -> None:
        """Virtual time passes until it is so."""
        assert self.world.run_until(done, LONG_S)

    @property
    def loading(self) -> Loading | None:
        """How far the load is, as its coordinator knows it."""
        jobs = [machine.catalogue.jobs.get(self.launcher.job) for machine in self.world.nodes.values()]
        rounds = (job.coordinator.restores._round for job in jobs if job is not None)
        return next((load.state for load in rounds if load is not None), None)

    def restored(self) -> set[SaveId]:
        """What the ranks train on."""
        self.until(lambda: self.session.phase == "train")
        return {order.save for order in self.session.orders.values()}

    def heal(self) -> None:
        """Room and speed again; and all that a job must reach in the end."""
        self.store.bytes_per_s = 0.0
        for machine in self.world.nodes.values():
            machine.arena.budget_nbytes = None
        examine(self.world)


def drained(play: Play) -> None:
    """It is written in time."""
    before = max(play.store.committed)
    assert play.restored() == {max(play.store.committed)} != {before}


def late(play: Play) -> None:
    """It is not: the ranks go on from what lies there."""
    assert play.restored() == {max(play.store.committed)}


def refused(play: Play) -> None:
    """A rank dies meanwhile."""
    session = play.session
    session.crash(session.procs[:1])
    play.until(lambda: play.session is not session)


@pytest.mark.parametrize(
    ("bytes_per_s", "then", "row"),
    [
        (SLOW, drained, "load: draining -> collecting: on the store, or never"),
        (CRAWLS, late, "load: draining -> collecting: too late"),
        (CRAWLS, refused, "load: draining -> -: refused"),
    ],
    ids=["drained", "late", "refused"],
)
def test_what_no_node_has_room_to_pull_is_drained_and_read_from_the_store(bytes_per_s, then, row):
    rows = Counter[str]()
    with reached(rows), once_in_all():
        play = Play(2, bytes_per_s)
        then(play)
        play.heal()
    assert rows["load: collecting -> draining: must be on the store first"]
    assert rows[row]
