"""A training in virtual time: the journal that its daemons would write, and where its time really went."""

import random
from dataclasses import dataclass, field

from ckptd.history.goodput import Kind
from ckptd.shared.protocol.journal import (
    Damaged,
    Durable,
    Ended,
    Entry,
    Lost,
    Problem,
    Protected,
    Restored,
    RunBegan,
    RunEnded,
    Staged,
    Steps,
)
from ckptd.shared.protocol.messages import End, Tier

BEGAN = 1_790_000_000.0  # seconds since 1970


@dataclass(frozen=True, kw_only=True)
class Training:
    """Durations in seconds, the state in bytes. steps_every: of client.step, 0: it is not called.

    jitter: how much stalls and drains vary, as a share.
    """

    step_s: float = 2.0
    save_every: int = 50
    stall_s: float = 0.4
    stage_s: float = 0.7
    protect_s: float = 3.0
    drain_s: float = 20.0
    restore_s: float = 5.0
    start_s: float = 60.0
    detect_s: float = 10.0
    away_s: float = 30.0
    nbytes: int = 64 << 30
    nodes: int = 4
    steps_every: int = 0
    jitter: float = 0.0


@dataclass
class Played:
    """entries of each run; spent: seconds by kind; checkpoints saved and usable, the newest last."""

    training: Training
    journal: list[list[Entry]] = field(default_factory=list)
    spent: dict[Kind, float] = field(default_factory=lambda: dict.fromkeys(Kind, 0.0))
    at: float = BEGAN
    top: int = -1
    done: int = -1  # newest step of the run that is going on
    usable: list[tuple[float, int, int]] = field(default_factory=list)  # since when, step, counter

    chance: random.Random = field(default_factory=lambda: random.Random(7))

    @property
    def entries(self) -> list[Entry]:
        """Of all runs."""
        return [entry for one in self.journal for entry in one]

    @property
    def runs(self) -> int:
        return len(self.journal)

    def run(self, seconds: float, *, how: str = "lost", word: bool = True) -> None:
        """Starts the training and lets it run until seconds of it are over. word: RunEnded is written."""
        t, number = self.training, len(self.journal) + 1
        end = self.at + seconds
        began = RunBegan(
            at=self.at, incarnation=number, run=number.to_bytes(16, "big"), world_size=t.nodes * 8, nodes=t.nodes,
            coordinator="n0", scheme="xor", set_size=4, drain_every="1", version="0.1.0",
        )  # fmt: skip
        entries: list[Entry] = [began]
        self._pass(Kind.START, t.start_s)
        counter = self._restore(entries)
        drained = self.at
        while self.at + t.step_s <= end:
            self._step(entries)
            if self.done % t.save_every:
                continue
            counter += 1
            stall_s, drain_s = self._varied(t.stall_s), self._varied(t.drain_s)
            self._pass(Kind.STALL, stall_s)
            staged = self.at + t.stage_s
            usable = staged + t.protect_s
            entries.append(
                Staged(at=staged, counter=counter, step=self.done, nbytes=t.nbytes, seconds=t.stage_s,
                       stall_s=stall_s, mean_stall_s=stall_s / 2)
            )  # fmt: skip
            if usable < end:
                entries.append(Protected(at=usable, counter=counter, seconds=t.protect_s))
                self.usable.append((usable, self.done, counter))
            if staged >= drained and staged + drain_s < end:
                drained = staged + drain_s
                entries.append(Durable(at=drained, counter=counter, seconds=drain_s, drain_s=drain_s, nbytes=t.nbytes))
            else:
                entries.append(
                    Ended(at=staged, counter=counter, step=self.done, end=End.SUPERSEDED, reason="a newer one")
                )
        self._end(entries, end, how, word)
        self.journal.append(sorted(entries, key=lambda entry: entry.at))

    def _step(self, entries: list[Entry]) -> None:
        self.done += 1
        self._pass(Kind.TRAINING if self.done > self.top else Kind.REPEATED, self.training.step_s)
        self.top = max(self.top, self.done)
        if self.training.steps_every and self.done % self.training.steps_every == 0:
            entries.append(Steps(at=self.at, step=self.done))

    def _restore(self, entries: list[Entry]) -> int:
        if not self.usable:
            self.done = -1
            return 0
        self._pass(Kind.RESTORE, self.training.restore_s)
        _, step, counter = self.usable[-1]
        tiers = {Tier.ARENA: 8 * self.training.nodes - 8, Tier.REBUILT: 8}
        entries.append(
            Restored(at=self.at, incarnation=self.runs, counter=counter, step=step, seconds=self.training.restore_s,
                     tiers=tiers, nbytes=self.training.nbytes, newest=-1)
        )  # fmt: skip
        self.done = step
        return counter

    def _end(self, entries: list[Entry], end: float, how: str, word: bool) -> None:
        self._pass(Kind.REPEATED if how == "lost" else Kind.UNEXPLAINED, max(0.0, end - self.at))
        if how != "lost":
            entries.append(RunEnded(at=self.at, how=how))
            return
        node = f"n{self.runs % self.training.nodes}"
        self._pass(Kind.UNEXPLAINED, self.training.detect_s)
        entries.append(Lost(at=self.at, node=node, what="node", ranks=8))
        entries.append(Problem(at=self.at, text=f"node {node} does not answer", times=3))
        if word:
            entries.append(RunEnded(at=self.at, how="lost"))
        self._pass(Kind.START, self.training.away_s)

    def _varied(self, seconds: float) -> float:
        return seconds * self.chance.uniform(1 - self.training.jitter, 1 + self.training.jitter)

    def _pass(self, kind: Kind, seconds: float) -> None:
        self.at += seconds
        self.spent[kind] += seconds


def played(training: Training, seed: int = 0, *, failures: int = 4, mean_s: float = 4000.0) -> Played:
    """A training that fails so often, at random, and then closes."""
    chance = random.Random(seed)
    found = Played(training)
    for _ in range(failures):
        found.run(training.start_s + 3 * training.step_s * training.save_every + chance.expovariate(1 / mean_s))
    found.run(training.start_s + 4 * training.step_s * training.save_every, how="closed")
    return found


def scrubbed(journal: list[list[Entry]]) -> list[list[Entry]]:
    """The same, where scrubs found damage in the second run: in memory, made good, and later on the store, for good."""
    first, second, *others = journal
    staged = [entry for entry in second if isinstance(entry, Staged)]
    early, late = staged[len(staged) // 3], staged[2 * len(staged) // 3]
    found: list[Entry] = [
        Damaged(
            at=one.at + 5, incarnation=2, counter=one.counter, step=one.step, node="n1", tier=tier, rank=9,
            what="block 3 is not as its digest says", mended=mended,
        )
        for one, tier, mended in ((early, Tier.ARENA, "the parity of its set"), (late, Tier.PFS, ""))
    ]  # fmt: skip
    return [first, sorted([*second, *found], key=lambda entry: entry.at), *others]
