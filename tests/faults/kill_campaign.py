"""``python -m tests.faults.kill_campaign COUNT SEED``: a job that saves without a pause is disturbed; promises hold.

Episodes of 25 disturbances, each on daemons of its own: that of seed 7 alone is COUNT 25 with SEED 7.
"""

import argparse
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from ckptd.checkpoint.verify import verify_path
from ckptd.shared.base.ids import JobKey
from ckptd.shared.format.integrity import XXH3
from ckptd.shared.protocol import journal as log
from ckptd.shared.settings.config import Config
from ckptd.shared.stores.kinds import open_files
from ckptd.store.journal import read_journal
from ckptd.store.posix.scan import scan
from ckptd.system.files import FileLayer
from tests.cluster import wait_for
from tests.faults.campaigns import OverdueError, answers, ended_by_signals, no_longer_than
from tests.faults.disturbing import Disturber
from tests.faults.event_logs import diary_of, lines_of, told_in
from tests.faults.journal_claims import MOST_NBYTES, Known, Loaded, lies, nbytes_of_saves
from tests.faults.kill_plan import EPISODE, HOMES, NODES, RELAYED, Round, rounds
from tests.faults.nodes.clusters import KB, Cluster, Ranks, Zygote, a_cluster
from tests.faults.nodes.run_trainer import RUN_TRAINER
from tests.faults.promises import Promises
from tests.faults.verdicts import Facts, Saved, judge

JOB = "job"
SIZES = (256 * KB, 512 * KB, 128 * KB, 640 * KB)
SAVE_TIMEOUT_S = 5.0
_SLACK_S = 3.0  # of a save beyond that, on cores that are busy
_PAUSE_S = 0.02
_CALL_S, _WORK_S, _TRAIN_S = 60.0, 15.0, 60.0
_EPISODE_S = 600
_FREE_S = 20.0
KEEP_LAST = Config().keep_last


@dataclass
class Counts:
    """Of one episode, or of all."""

    disturbances: Counter[str] = field(default_factory=Counter)
    loads: Counter[str] = field(default_factory=Counter)  # by tiers
    told: Counter[str] = field(default_factory=Counter)
    records: Counter[str] = field(default_factory=Counter)  # of journals, by kind
    moot: int = 0
    strays: int = 0
    findings: list[str] = field(default_factory=list)

    def add(self, other: "Counts") -> None:
        """Those of an episode."""
        for mine, theirs in (
            (self.disturbances, other.disturbances),
            (self.loads, other.loads),
            (self.told, other.told),
            (self.records, other.records),
        ):
            mine.update(theirs)
        self.moot, self.strays = self.moot + other.moot, self.strays + other.strays
        self.findings += other.findings

    def __str__(self) -> str:
        head = f"{self.disturbances.total()} disturbances, {self.loads.total()} loads, "
        lines = [head + f"{len(self.findings)} promises broken"]
        for name in ("disturbances", "loads", "told", "records"):
            counts = getattr(self, name)
            lines.append(f"{name}: " + (", ".join(f"{key} {counts[key]}" for key in sorted(counts)) or "none"))
        lines.append(f"found nothing to disturb: {self.moot}; stores made where the real one was away: {self.strays}")
        return "\n".join(lines)


class Episode:
    """One job through its rounds."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster, self._name = cluster, name
        self._disturber = Disturber(cluster)
        self._promises = Promises()
        self._run = 0
        self._first: dict[int, int] = {}  # step of a run
        self._incarnations: dict[int, int] = {}
        self._known = Known(HOMES, NODES, since=time.time())
        self._untrue = set[str]()
        self._now = self._before = "begin"
        self.counts = Counts()

    def play(self, planned: list[Round]) -> None:
        """All rounds, then the end."""
        for number, one in enumerate(planned):
            self._now = f"round {number} {one}"
            self._round(one)
            self._before = self._now
        self._now = "end"
        self._end()

    def _round(self, one: Round) -> None:
        ranks = self._ranks()
        try:
            if not self._connect(ranks):
                return
            if one.while_loading:
                ranks.start("load")
            elif not self._is_at_work(ranks):
                return
            done = self._disturber.disturb(ranks, one.disturbances)
            self.counts.moot += len(one.disturbances) - len(done)
            self.counts.disturbances.update(d.kind for d in done)
            time.sleep(one.then_s)
        finally:
            ranks.kill()
            lost = len(self._disturber.lost)
            self._disturber.recover()
            self._hear(stopped=any(d.kind == "stop-rank" for d in one.disturbances))
            self._lose(lost)
        self._check_store()
        self._check_journal()

    def _lose(self, nodes: int) -> None:
        for _ in range(nodes):
            self._promises.node_lost()
        self._known.lost_nodes += nodes

    def _ranks(self) -> Ranks:
        self._run += 1
        ranks = self._cluster.ranks(HOMES, JOB, SIZES, RUN_TRAINER)
        for rank in ranks.all:
            rank.call("be", self._run)
            rank.call("keep_diary", diary_of(self._cluster.directory, self._run, rank.rank))
        return ranks

    def _connect(self, ranks: Ranks) -> bool:
        said = answers(ranks, "connect", JOB, save_timeout_s=SAVE_TIMEOUT_S, timeout_s=_CALL_S)
        if failed := [f"{answer.kind}: {answer.text}" for answer in said if answer.kind]:
            self._find("connect", "; ".join(failed))
        return not failed

    def _is_at_work(self, ranks: Ranks) -> bool:
        """Loads, which is the check of what the last round did; then saves, until all ranks have staged something."""
        self._load(ranks)
        ranks.start("train", self._first[self._run], _TRAIN_S, _PAUSE_S)
        try:
            wait_for(lambda: told_in(self._cluster.directory, self._run), _WORK_S, every_s=0.02)
        except AssertionError:
            self._find("stuck", f"nothing is staged {_WORK_S:g} s after the load")
            return False
        return True

    def _load(self, ranks: Ranks) -> None:
        """What is there must be what was promised. After an error the job begins anew, as a user would have it."""
        floor = self._promises.floor
        said = answers(ranks, "load", timeout_s=_CALL_S)
        verdict = judge(said, Facts(self._saved(), frozenset({floor} if floor else ())))
        self.counts.loads["+".join(sorted(set(verdict.tiers))) or verdict.kind] += 1
        if verdict.is_finding or (verdict.kind == "error" and floor is not None):
            self._find(verdict.kind, f"{verdict.text}; promised: {self._promises}")
            self._promises = Promises()  # what is lost once is told once
        elif verdict.found is not None:
            self._promises.loaded(verdict.found, verdict.tiers)
        self._first[self._run] = verdict.found[1] + 1 if verdict.found is not None else 0
        number = self._incarnations[self._run] = ranks[0].call("incarnation")
        found = verdict.found
        self._known.loads[number] = (
            Loaded(self._incarnations[found[0]], found[1], Counter(verdict.tiers)) if found is not None else None
        )

    def _saved(self) -> frozenset[Saved]:
        """Of each run the steps that some rank began to save: at most one more than was noted."""
        last = dict(self._first)
        for run, _, word in lines_of(self._cluster.directory):
            step = word["step"] if isinstance(word, dict) else word[0]
            last[run] = max(last.get(run, step), step)
        return frozenset((r, s) for r, first in self._first.items() for s in range(first, last[r] + 2))

    def _hear(self, *, stopped: bool) -> None:
        """What the ranks of this run were told, and what save did to them."""
        told = told_in(self._cluster.directory, self._run)
        self._promises.told(told)
        self.counts.told.update(word.milestone for word in told)
        for _, rank, word in lines_of(self._cluster.directory, self._run):
            if isinstance(word, dict) and "raised" in word:
                self._find("raised", f"rank {rank}, step {word['step']}: {word['raised']}")
            elif isinstance(word, dict) and word["stall_s"] > SAVE_TIMEOUT_S + _SLACK_S and not stopped:
                self._find("stall", f"rank {rank}, step {word['step']}: {word['stall_s']:.1f} s")

    def _check_journal(self) -> list[log.Entry]:
        """Whatever is on record is true."""
        found = read_journal(open_files(f"{self._cluster.store}/{JOB}", XXH3))
        committed = scan(FileLayer(), JobKey(self._cluster.store, JOB)).committed
        stored = {(one.committed.save.incarnation, one.committed.save.counter) for one in committed}
        for run, number in self._incarnations.items():
            self._known.steps.setdefault(number, set()).update(self._saved_by_all(run))
        for text in lies(found.entries, self._known, stored, KEEP_LAST, time.time()):
            if text not in self._untrue:
                self._untrue.add(text)
                self._find("untrue", text)
        if found.damaged:
            self._find("damaged", f"{found.damaged} records of the journal")
        return found.entries

    def _saved_by_all(self, run: int) -> range:
        """Steps that each rank may have saved: one more than it noted."""
        last = dict.fromkeys(range(len(HOMES)), self._first[run] - 1)
        for _, rank, word in lines_of(self._cluster.directory, run):
            last[rank] = max(last[rank], word["step"] if isinstance(word, dict) else word[0])
        return range(self._first[run], min(last.values()) + 2)

    def _check_whole_journal(self) -> None:
        """Of the last run, which nothing disturbed, all is on record; and no save takes much room there."""
        number = self._incarnations[self._run]
        self._known.closed.add(number)
        wanted = {"Staged", "Protected", "Durable", "RunEnded"} | ({"Restored"} if self._known.loads[number] else set())
        kinds = set[str]()

        def there() -> bool:
            kinds.clear()
            kinds.update(_kinds_of_run(self._check_journal(), number))
            return wanted <= kinds

        try:
            wait_for(there, _FREE_S)
        except AssertionError:
            self._find("silent", f"the journal lacks {wanted - kinds} of incarnation {number}")
        entries = self._check_journal()
        nbytes, saves = nbytes_of_saves(entries)
        if nbytes > MOST_NBYTES * saves:
            self._find("large", f"{saves} saves have {nbytes} bytes of records")
        self.counts.records.update(type(entry).__name__ for entry in entries)
        self.counts.records["bytes of saves"] += nbytes

    def _check_store(self) -> None:
        """What is durable lies there, or something newer."""
        if (durable := self._promises.durable) is None or durable[0] not in self._incarnations:
            return
        wanted = (self._incarnations[durable[0]], durable[1])
        saves = [entry.committed.save for entry in scan(FileLayer(), JobKey(self._cluster.store, JOB)).committed]
        if not any((save.incarnation, save.step) >= wanted for save in saves):
            self._find("removed", f"{wanted} is durable, the store has {[str(save) for save in saves]}")

    def _end(self) -> None:
        """All nodes are lost, the store has what is durable; what the job saves then leaves nothing in memory."""
        for name in NODES:
            self._cluster.replace(name)
            self._lose(1)
        ranks = self._ranks()
        if self._connect(ranks):
            self._load(ranks)
            ranks.save(self._first[self._run], "protected", "durable")
            ranks.call("close")
            try:
                wait_for(lambda: not any(node.slots() for node in self._cluster.nodes.values()), _FREE_S)
            except AssertionError:
                self._find("leak", f"slots are left: {[node.slots() for node in self._cluster.nodes.values()]}")
            self._check_whole_journal()
        ranks.kill()
        if problems := verify_path(os.path.join(self._cluster.store, JOB)).problems:
            self._find("damaged", str(problems))
        self.counts.strays = self._disturber.strays

    def _find(self, kind: str, text: str) -> None:
        self.counts.findings.append(f"{kind}: {self._name}, in {self._now}, after {self._before}: {text}")


def _kinds_of_run(entries: list[log.Entry], incarnation: int) -> set[str]:
    found, now = set[str](), 0
    for entry in entries:
        now = entry.incarnation if isinstance(entry, log.RunBegan) else now
        if now == incarnation:
            found.add(type(entry).__name__)
    return found


def episode(seed: int, count: int, zygote: Zygote) -> Counts:
    """So many disturbances of this seed."""
    planned = rounds(seed, count)
    with a_cluster(zygote, NODES, relayed=RELAYED) as cluster:
        played = Episode(cluster, f"seed {seed}")
        try:
            with no_longer_than(_EPISODE_S):
                played.play(planned)
        except (OverdueError, AssertionError, OSError) as error:
            played.counts.findings.append(f"stuck: seed {seed}: {type(error).__name__}: {error}")
    return played.counts


def main() -> int:
    """The exit status is 1 when a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no episode after so long")
    args = parser.parse_args()
    total, began = Counts(), time.monotonic()
    with ended_by_signals():
        zygote = Zygote()
        try:
            for number, done in enumerate(range(0, args.count, EPISODE)):
                if time.monotonic() - began > 60 * args.minutes:
                    print(f"stopped after {args.minutes:g} minutes, before seed {args.seed + number}")
                    break
                counts = episode(args.seed + number, min(EPISODE, args.count - done), zygote)
                total.add(counts)
                print(f"seed {args.seed + number}: {counts}".partition("\n")[0], flush=True)
                for text in counts.findings:
                    print(f"  BROKEN {text[:1000]}", flush=True)
        finally:
            zygote.close()
            print(f"{total}\n{time.monotonic() - began:.0f} s", flush=True)
    return 1 if total.findings else 0


if __name__ == "__main__":
    sys.exit(main())
