"""What is done to a job that saves without a pause: a pure function of a seed."""

import random
from dataclasses import dataclass

HOMES = "aabc"  # of the ranks
NODES = "abc"
RELAYED = "b"  # the node whose links can be cut
EPISODE = 25  # disturbances on one set of daemons

# name: (weight, what it is done to, whether it is held for a while)
KINDS = {
    "kill-rank": (3, "rank", False),
    "kill-daemon": (4, "node", False),
    "kill-worker": (4, "node", False),
    "lose-node": (4, "node", False),
    "stop-rank": (1, "rank", True),
    "stop-daemon": (2, "node", True),
    "stop-worker": (2, "node", True),
    "store-full": (2, "", True),
    "store-away": (2, "", True),
    "kill-all": (2, "", False),
    "end-all": (1, "", False),
    "cut-links": (3, "", False),
    "cut-bulk": (3, "", True),
    "hold-bulk": (1, "", True),
}
_LAST = {"lose-node", "kill-all", "end-all"}


@dataclass(frozen=True)
class Disturbance:
    """One of them. kill-all, end-all: all daemons and ranks, by SIGKILL or SIGTERM. lose-node: memory and all.

    stop-...: SIGSTOP, and SIGCONT hold_s later. store-full: workers cannot write beyond some bytes of a file.
    store-away: the store's directory is not there. cut-...: connections end; bulk ones of hold_s time after time.
    """

    kind: str
    victim: str = ""  # a node or the number of a rank
    after_s: float = 0.0  # since the last one, or since the job was at work
    hold_s: float = 0.0

    def __str__(self) -> str:
        held = f" for {self.hold_s:.2f} s" if self.hold_s else ""
        return f"{self.kind} {self.victim}".rstrip() + f" after {self.after_s:.2f} s{held}"


@dataclass(frozen=True)
class Round:
    """What happens to one start of the job: one disturbance, or two that overlap. All ranks are killed then.

    while_loading: it comes while the job loads, not while it saves.
    """

    disturbances: tuple[Disturbance, ...]
    while_loading: bool
    then_s: float  # from there to the end of all ranks

    def __str__(self) -> str:
        when = "load" if self.while_loading else "save"
        return f"[{when}] " + ", ".join(map(str, self.disturbances)) + f", end after {self.then_s:.2f} s"


def rounds(seed: int, count: int) -> list[Round]:
    """So many disturbances, in rounds."""
    rng, made, left = random.Random(f"kills-{seed}"), [], count
    while left:
        number = min(left, 2 if rng.random() < 0.25 else 1)
        left -= number
        made.append(_round(rng, number))
    return made


def _round(rng: random.Random, number: int) -> Round:
    loading = rng.random() < 0.12
    found = [_disturbance(rng, rng.uniform(0.0, 0.15 if loading else 0.6))]
    while len(found) < number:
        more = _disturbance(rng, rng.uniform(0.0, 0.2))
        if more.kind != found[0].kind and more.victim != found[0].victim:
            found.append(more)
    found.sort(key=lambda one: one.kind in _LAST)  # nothing is left to be disturbed after these
    return Round(tuple(found), loading, rng.choice((0.0, rng.uniform(0.0, 0.6))))


def _disturbance(rng: random.Random, after_s: float) -> Disturbance:
    kind = rng.choices(list(KINDS), [weight for weight, *_ in KINDS.values()])[0]
    _, victim, held = KINDS[kind]
    who = {"rank": str(rng.randrange(len(HOMES))), "node": rng.choice(NODES), "": ""}[victim]
    long = kind == "stop-daemon" and rng.random() < 0.3  # than a peer waits for it
    hold_s = (rng.uniform(2.2, 3.0) if long else rng.uniform(0.1, 1.0)) if held else 0.0
    return Disturbance(kind, who, after_s, hold_s)
