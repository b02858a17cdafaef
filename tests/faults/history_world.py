"""Four real daemons, one store path, one job, and what is known of all of its runs."""

import contextlib
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.faults.campaigns import answers
from tests.faults.event_logs import diary_of, told_in
from tests.faults.nodes.clusters import KB, Cluster, Ranks
from tests.faults.nodes.run_trainer import RUN_TRAINER
from tests.faults.verdicts import Facts, Saved, Verdict, judge

JOB = "job"
SIZES = (96 * KB, 160 * KB)
_CALL_S, _WAIT_S, _REMOVE_S = 60.0, 10.0, 5.0
_SETTINGS: dict[str, Any] = {"save_timeout_s": 5.0, "connect_timeout_s": 20.0}


@dataclass
class Run:
    """One start of the job."""

    number: int  # from 1
    homes: str
    store: int
    ranks: Ranks
    verdict: Verdict
    next_step: int = 0
    overtaken_at: int | None = None  # saves from this step on began after a newer run had begun on the same store

    @property
    def connected(self) -> bool:
        """Whether its ranks may save."""
        return self.verdict.kind in {"good", "none", "mixed", "stale", "lost"}

    @property
    def alive(self) -> bool:
        """Whether no rank of it was killed."""
        return all(rank.alive for rank in self.ranks.all)

    def incarnation(self) -> int:
        """Which one rank 0's daemon has given it."""
        return int(self.ranks[0].call("incarnation"))

    def logs(self) -> str:
        """What the client library told these ranks."""
        return "\n".join(line for answer in answers(self.ranks, "logs") for line in answer.value or ())


class World:
    """Nodes a, b, c, d. Each method is an event; a finding is noted and the world goes on."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.runs: list[Run] = []
        self.findings: list[str] = []
        self._off: set[str] = set()
        self._saved: set[Saved] = set()
        self._store, self._stores = 0, 1
        self._away: list[tuple[int, str]] = []  # stores that are not mounted, the last one last
        self._durable: dict[int, set[Saved]] = {0: set()}  # by store
        self._known: set[Saved] = set()  # of what was told durable, what was noted

    # --- runs

    def start(self, homes: str, *, steps: int = 0, until: str = "", takeover: bool = False, **settings: Any) -> Run:
        """Ranks on these nodes connect, load and save so many steps, the last one waited for."""
        self._note_durable()
        number = len(self.runs) + 1
        run = Run(number, homes, self._store, self.cluster.ranks(homes, JOB, SIZES, RUN_TRAINER), Verdict("none"))
        self.runs.append(run)
        for rank in run.ranks.all:
            rank.call("be", number)
            rank.call("keep_diary", diary_of(self.cluster.directory, number, rank.rank))
        facts = Facts(frozenset(self._saved), frozenset(self._durable[self._store]))
        said = answers(run.ranks, "connect", JOB, takeover=takeover, timeout_s=_CALL_S, **_SETTINGS | settings)
        if not any(answer.kind for answer in said):
            for other in self.runs[:-1]:
                if other.alive and other.store == run.store and other.overtaken_at is None:
                    other.overtaken_at = other.next_step
            said = answers(run.ranks, "load", timeout_s=_CALL_S)
        run.verdict = judge(said, facts)
        if run.verdict.is_finding:
            self.findings.append(f"run {number}: {run.verdict.kind}: {run.verdict.text}")
        if run.connected:
            run.next_step = max((answer.value["step"] + 1 for answer in said if answer.value), default=0)
            self.save(run, steps, until)
        else:
            run.ranks.kill()  # as a training ends that gets an error
        return run

    def save(self, run: Run, steps: int, until: str = "", timeout_s: float = _WAIT_S) -> list[str]:
        """Saves of all ranks; by rank empty once the last one has the milestone, else why it has not."""
        for step in range(run.next_step, run.next_step + steps):
            self._saved.add((run.number, step))
            run.next_step = step + 1
            answers(run.ranks, "save", step, timeout_s=_CALL_S)
        if not steps or not until:
            return []
        said = answers(run.ranks, "wait_or_why", run.next_step - 1, until, timeout_s, timeout_s=_CALL_S)
        return [answer.value if not answer.kind else f"{answer.kind}: {answer.text}" for answer in said]

    def end(self) -> None:
        """SIGKILL to all ranks."""
        for run in self.runs:
            run.ranks.kill()
        self._note_durable()

    # --- nodes

    def crash(self, node: str) -> None:
        """The daemon is killed; another one finds its memory."""
        if node not in self._off:
            self.cluster.restart(node)

    def off(self, node: str) -> None:
        """The node is away, with its memory."""
        if node not in self._off:
            self.cluster.nodes[node].kill()
            self._off.add(node)
        self._end_runs_at(node)

    def on(self, node: str) -> None:
        """It is back, with its old memory."""
        if node in self._off:
            self.cluster.start(node)
            self._off.discard(node)

    def lose(self, node: str) -> None:
        """Another machine takes the node's place."""
        self.cluster.replace(node)
        self._off.discard(node)
        self._end_runs_at(node)

    def _end_runs_at(self, node: str) -> None:
        for run in self.runs:
            if node in run.homes:
                run.ranks.kill()
        self._note_durable()

    # --- the store

    def start_over(self) -> None:
        """The job's directory is removed, by a user whose job does not run."""
        self._note_durable()
        path, deadline = os.path.join(self.cluster.store, JOB), time.monotonic() + _REMOVE_S
        while os.path.lexists(path) and time.monotonic() < deadline:  # a daemon may still drain into it
            shutil.rmtree(path, ignore_errors=True)
        self._durable[self._store].clear()

    def unmount(self) -> None:
        """The store's path is an empty directory."""
        self._move_away()
        os.mkdir(self.cluster.store)
        self._store, self._stores = self._stores, self._stores + 1
        self._durable[self._store] = set()
        self._note_durable(of=None)

    def remount(self) -> None:
        """The store that was there before is back."""
        store, path = self._away.pop()
        self._move_away(keep=False)
        os.rename(path, self.cluster.store)
        self._store = store
        self._note_durable(of=None)

    def _move_away(self, *, keep: bool = True) -> None:
        self._note_durable()
        path = f"{self.cluster.store}.{self._store}"
        os.rename(self.cluster.store, path)
        if keep:
            self._away.append((self._store, path))

    def _note_durable(self, of: int | None = -1) -> None:
        """What ranks were told since the last time is durable on the present store; of None: on nobody knows which."""
        new = {(t.run, t.step) for t in told_in(self.cluster.directory) if t.milestone == "durable"} - self._known
        self._known |= new
        if of is not None:
            self._durable[self._store] |= new
        for run, step in sorted(new):
            overtaken = self.runs[run - 1].overtaken_at
            if overtaken is not None and step >= overtaken:
                self.findings.append(f"run {run}: unfenced: told that step {step} is durable after a newer run began")

    def close(self) -> None:
        """All ranks end."""
        with contextlib.suppress(OSError):
            self.end()


def committed(store: str, job: str = JOB) -> Sequence[str]:
    """Names of the job's checkpoints on a store."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(name for name in os.listdir(os.path.join(store, job)) if name.startswith("step-"))
    return []
