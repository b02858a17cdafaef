"""A training of weeks that fails at random, in virtual time: what it saves, drains and loses.

``Job`` computes what lies in memory and on the store when a run fails. ``CoreJob`` plays each save through the real
core of a daemon, which decides what is drained, and when.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckptd.history import intervals
from ckptd.history.intervals import Choice, Costs
from ckptd.shared.base.ids import SaveId
from ckptd.shared.protocol.messages import Cadence
from tests.runs import RUN
from tests.unit.core.a_job import AJob

# Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 GPUs (arXiv 2407.21783, table 5). 14 bytes a
# parameter: BF16, an FP32 copy and two FP32 moments. A step: 16 million tokens, 6 FLOPs a parameter, 400 TFLOP/s.
GPUS, DAYS, INTERRUPTIONS = 16_384, 54, 419
RANK_NBYTES = int(14 * 405e9 / GPUS)
STEP_S = 6 * 405e9 * 16e6 / (GPUS * 400e12)
WALL_S = DAYS * 86400 / INTERRUPTIONS  # from one interruption to the next, with the restart
START_S, STORE_SHARE = 600.0, 0.1  # stated: a restart without its load; failures from which only the store helps
AUTO = Cadence(0, 0.0)
WITHIN, MOST_LOST = 0.98, 0.005  # of the ETTR of the best fixed interval; of the wall time, for checkpoints
_TRIED = sorted({*range(1, 40), 100, *(round(1.15**n) for n in range(70))})  # steps between two saves


class Job:
    """A job that saves every so many steps and fails at random; progress in steps, time in seconds.

    A drain follows the first save of a run, and each drain_saves after it. What it put on the store stays there.
    """

    def __init__(self, costs: Costs, steps: int, drain_saves: int, seed: int) -> None:
        self.costs, self.steps, self.drain_saves = costs, steps, drain_saves
        self.period_s = steps * costs.step_s + costs.stall_s
        self.chance = random.Random(seed)
        self.wall_s = self.up_s = 0.0
        self.progress = self.stored = self.drains = 0

    def usable(self, up_s: float) -> int:
        """The last save that memory has when a run of so many seconds fails."""
        return max(0, math.floor((up_s - self.costs.usable_s) / self.period_s))

    def drained(self, up_s: float) -> int:
        """The last save that the store has then; 0: none of this run."""
        found = max(0, math.floor((up_s - self.costs.usable_s - self.costs.drain_s) / self.period_s))
        return found - (found - 1) % self.drain_saves if found else 0

    def fails_after(self, up_s: float) -> None:
        """A new run begins from what memory has, or the store."""
        usable, drained = self.usable(up_s), self.drained(up_s)
        self.stored = self.progress + drained * self.steps if drained else self.stored
        needs_store = self.chance.random() < self.costs.store_share
        self.progress = self.stored if needs_store else self.progress + usable * self.steps
        self.up_s += up_s
        self.wall_s += up_s + self.costs.restart_s

    def run(self, mtbf_s: float, failures: int) -> "Job":
        """So many runs, and itself."""
        for _ in range(failures):
            self.fails_after(self.chance.expovariate(1 / mtbf_s))
        return self

    @property
    def ettr(self) -> float:
        """The share of the wall time that is left of the training."""
        return self.progress * self.costs.step_s / self.wall_s

    @property
    def lost(self) -> float:
        """The share that checkpoints took: stalls, and steps that are repeated. Restarts cost what they cost."""
        return self.up_s / self.wall_s - self.ettr


class CoreJob(Job):
    """The same job, whose saves are due as its cadence says, by the core of the daemon that coordinates it."""

    def __init__(self, costs: Costs, steps: int, cadence: Cadence, seed: int) -> None:
        super().__init__(costs, steps, 0, seed)
        self.cadence = cadence

    def drained(self, up_s: float) -> int:
        """A daemon sees the saves of the run, and the store takes drain_s for each that it drains."""
        job = AJob(world=1, slots_per_rank=8, cadence=self.cadence, checked=False).start()
        done: list[int] = []
        for counter in range(1, math.floor(up_s / self.period_s) + 1):
            done += self._drains(job, counter * self.period_s)
            job.tick(counter * self.period_s - job.now)
            job.take()
            job.stage(0, SaveId(1, counter, counter * self.steps, RUN))
        done += self._drains(job, up_s)
        self.drains += len(done)
        return max(done, default=0)

    def _drains(self, job: AJob, until: float) -> Iterator[int]:
        """Ends those that end until then: their saves."""
        while (active := job.facts.active) is not None:
            ends = job.facts.records[active].drain_since + self.costs.drain_s
            if ends > until:
                return
            job.tick(max(0.0, ends - job.now))
            job.drain(active)
            yield active.counter


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of jobs with the same failures: one left to itself, and those with fixed intervals by their steps."""

    costs: Costs
    mtbf_s: float
    advised: Choice
    auto: Sequence[CoreJob]
    fixed: dict[int, list[Job]]

    @property
    def ettr(self) -> float:
        """With the advised interval of saves and drain_every="auto"."""
        return mean([job.ettr for job in self.auto])

    @property
    def best(self) -> int:
        """Steps of the best fixed interval."""
        return max(self.fixed, key=self.ettr_of)

    def ettr_of(self, steps: int) -> float:
        """With a fixed interval, and as many drains as the store takes."""
        return mean([job.ettr for job in self.fixed[steps]])

    def missed(self) -> list[str]:
        """Bars that are missed."""
        lost = mean([job.lost for job in self.auto])
        found = [] if self.ettr >= WITHIN * self.ettr_of(self.best) else ["within 2 % of the best fixed interval"]
        return found + ([] if lost <= MOST_LOST else ["0.5 % of the time for checkpoints"])

    def __str__(self) -> str:
        costs, advised = self.costs, self.advised
        stated = f"a step {costs.step_s:.2f} s, restart {costs.restart_s:.1f} s, {costs.store_share:.0%} need the store"
        lines = [
            f"405B on {GPUS:,} GPUs, {INTERRUPTIONS} interruptions in {DAYS} days: up {self.mtbf_s:.0f} s; {stated}",
            f"stall {costs.stall_s:.4f} s, usable {costs.usable_s:.2f} s after it, drain {costs.drain_s:.2f} s",
        ]
        for steps in sorted({1, 10, 30, 100, advised.steps, self.best}):
            lost = mean([job.lost for job in self.fixed[steps]])
            what = "  advised" * (steps == advised.steps) + "  best fixed" * (steps == self.best)
            lines.append(f"save every {steps:4} steps: ETTR {self.ettr_of(steps):.4f}, checkpoints {lost:.3%}{what}")
        lost, drains = mean([job.lost for job in self.auto]), sum(job.drains for job in self.auto)
        lines.append(
            f'drain_every="auto", save every {advised.steps} steps: ETTR {self.ettr:.4f} '
            f"({self.ettr / self.ettr_of(self.best):.4f} of the best fixed), computed {advised.ettr:.4f}; "
            f"checkpoints {lost:.3%}, computed {advised.checkpoints:.3%}; {drains:,} drains"
        )
        return "\n".join(lines)


def mean(values: Sequence[float]) -> float:
    """Of one value or more."""
    return sum(values) / len(values)


def play(costs: Costs, *, failures: int = INTERRUPTIONS, seeds: int = 1) -> Outcome:
    """Weeks of the 405B shape, as often as there are seeds; restarts are in the trace's days."""
    mtbf_s = WALL_S - costs.restart_s
    advised = intervals.best(costs, mtbf_s)
    fixed = {
        steps: [
            Job(costs, steps, intervals.choice(costs, mtbf_s, steps).drain_saves, seed).run(mtbf_s, failures)
            for seed in range(seeds)
        ]
        for steps in sorted({*_TRIED, advised.steps})
    }
    auto = [CoreJob(costs, advised.steps, AUTO, seed) for seed in range(seeds)]
    for job in auto:
        job.run(mtbf_s, failures)
    return Outcome(costs=costs, mtbf_s=mtbf_s, advised=advised, auto=auto, fixed=fixed)
