"""Histories of a job that is started over, remounted, lost and brought back: a pure function of a seed."""

import dataclasses
import random
from dataclasses import dataclass

NODES = "abcd"
RANKS = 2
SCHEMES = ("none", "xor")
MILESTONES = ("", "staged", "protected", "durable", "durable", "durable")


@dataclass(frozen=True)
class Event:
    """One thing that happens. Its name is one of:

    start: ranks on these nodes (the first has rank 0) connect, load, save so many steps and wait for a milestone of the
    last one. linger: ranks of an older run that live save so many more. end: all ranks are killed. crash: the node's
    daemon is killed, another one finds its memory. off: the node is switched off, its memory is kept. on: it is back.
    lose: another machine takes the node's place. start-over: the job's directory on the store is removed. unmount: the
    store's path is an empty directory. remount: the store is back.
    """

    name: str
    nodes: str = ""
    steps: int = 0
    until: str = ""
    takeover: bool = False

    def __str__(self) -> str:
        words = [self.name, self.nodes, f"{self.steps} steps" if self.steps else "", self.until]
        return " ".join(filter(None, [*words, "takeover" if self.takeover else ""]))


@dataclass
class _World:
    """What the author of a history must know of it."""

    up: set[str]
    living: list[str]  # nodes of each run whose ranks live
    steps: int  # of most runs: what can be mixed has the same numbers
    mounted: bool = True


@dataclass(frozen=True)
class History:
    """One of them."""

    seed: int
    scheme: str
    events: tuple[Event, ...]

    def __str__(self) -> str:
        return f"{self.scheme}: " + ", ".join(map(str, self.events))


def history(seed: int) -> History:
    """The history of this seed: a run, a second one, mostly elsewhere, then runs on nodes of both."""
    rng = random.Random(f"history-{seed}")
    world = _World(set(NODES), [], rng.randint(1, 3))
    first = "".join(rng.sample(NODES, RANKS))
    events = [*_start(rng, world, first)]
    taken_over = rng.random() < 0.2
    if not taken_over:
        renumbered = rng.random() < 0.6  # the next run counts from 1 again
        kinds = rng.choice((["start-over"], ["remount"])) if renumbered else []
        events += _pause(rng, world, kinds, rng.choice((0, 0, 1)) if kinds else rng.choice((1, 2)))
    second = _homes(rng, world, avoid=first if rng.random() < 0.75 else "")
    events += _bring_back(rng, world, second)
    events += _start(rng, world, second)
    if world.living[:-1] and rng.random() < 0.7:
        events.append(Event("linger", world.living[0], steps=rng.randint(1, 2)))
    for _ in range(rng.choice((1, 1, 2))):
        events += _pause(rng, world, [], rng.choice((0, 1, 1, 2, 3)))
        if not world.mounted and rng.random() < 0.7:
            world.mounted = True
            events.append(Event("remount"))
        mixed = "".join(rng.sample([rng.choice(first), rng.choice(second)], 2))
        homes = mixed if len(set(mixed)) == RANKS and rng.random() < 0.7 else _homes(rng, world)
        events += _bring_back(rng, world, homes)
        events += _start(rng, world, homes)
    return History(seed, rng.choice(SCHEMES), tuple(events))


def _homes(rng: random.Random, world: _World, avoid: str = "") -> str:
    found = [node for node in NODES if node not in avoid]
    up = [node for node in found if node in world.up]
    return "".join(rng.sample(up if len(up) >= RANKS else found, RANKS))


def _start(rng: random.Random, world: _World, homes: str) -> list[Event]:
    met = any(set(homes) & set(other) for other in world.living)
    steps = world.steps if rng.random() < 0.7 else rng.randint(1, 3)
    event = Event("start", homes, steps, rng.choice(MILESTONES))
    takeover = bool(world.living) and (met or rng.random() < 0.5)
    world.living.append(homes)
    return [dataclasses.replace(event, takeover=takeover)]


def _bring_back(rng: random.Random, world: _World, homes: str) -> list[Event]:
    """Nodes that the next run takes and that are off."""
    missing = [node for node in homes if node not in world.up]
    world.up |= set(missing)
    return [Event(rng.choice(("on", "on", "lose")), node) for node in missing]


def _pause(rng: random.Random, world: _World, kinds: list[str], count: int) -> list[Event]:
    """What happens between two runs: these, and so many more."""
    events = []
    if world.living and rng.random() < 0.9:
        events.append(Event("end"))
        world.living.clear()
    others = ("start-over", "start-over", "remount", "remount", "lose", "lose", "off", "on", "crash")
    for kind in [*kinds, *rng.choices(others, k=count)]:
        if kind == "start-over":
            events += [Event("end")] if world.living else []
            world.living.clear()
            events.append(Event(kind))
        elif kind == "remount":
            world.mounted = not world.mounted
            events.append(Event("remount" if world.mounted else "unmount"))
        elif kind == "on":
            events += _bring_back(rng, world, rng.choice(NODES))
        else:
            events.append(_at_a_node(rng, world, kind))
    return events


def _at_a_node(rng: random.Random, world: _World, kind: str) -> Event:
    node = rng.choice(sorted(world.up) if len(world.up) > RANKS or kind == "crash" else NODES)
    if kind == "crash":
        return Event(kind, node)
    world.living[:] = [homes for homes in world.living if node not in homes]
    if kind == "off" and node in world.up and len(world.up) > RANKS:
        world.up.discard(node)
        return Event("off", node)
    world.up.add(node)
    return Event("lose", node)
