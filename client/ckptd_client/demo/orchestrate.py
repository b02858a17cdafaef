"""The story: an undisturbed training, the same training killed twice, and the proof that both are equal."""

import importlib.util
import json
import time
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from ckptd_client.demo import DemoError, promises, report, told
from ckptd_client.demo.daemon import ckptd, kill_in_drain
from ckptd_client.demo.journal import Loss, Restored
from ckptd_client.demo.narration import Narrator
from ckptd_client.demo.plan import NODES, RANKS_PER_NODE, WORLD_SIZE, Plan
from ckptd_client.demo.ranks import JOB, Ranks
from ckptd_client.demo.workspace import Node, Workspace, nodes

_SLOW_DRAIN = "32MiB"  # per second and node: slow enough to be hit in the middle
_SLOW_RATE = "32 MiB/s a node"
_VICTIM = WORLD_SIZE - 1
_NO_DAEMON = 3  # exit code of ckptd status
_ENDS = ("lost", "", "closed")  # of the starts, in the job's journal; of the second no daemon lived to tell


class Story:
    """Three acts and an epilogue, printed on the console while they run."""

    def __init__(self, console: Console, space: Workspace, plan: Plan) -> None:
        self._narrator = Narrator(console, space)
        self._space = space
        self._plan = plan
        self._first, self._lost, self._spare = nodes(space, "abc")

    def run(self) -> None:
        """Runs the story. Raises DemoError if a promise is broken."""
        reference = self._act_1()
        first, second, after_rank = self._act_2()
        third, after_node = self._act_3(second)
        restores = [("one rank's death", after_rank), ("a node's loss", after_node)]
        self._epilogue(reference, [first, second], third, restores)

    def _act_1(self) -> Ranks:
        self._narrator.title("Act 1: a training that nobody disturbs")
        every = self._plan.save_every
        self._narrator.say(
            f"{WORLD_SIZE} ranks train a small GPT on Python's own source; every {every} steps torch.save is timed"
        )
        ranks = Ranks("act 1", self._space, self._plan)
        self._follow(ranks)
        return ranks

    def _act_2(self) -> tuple[Ranks, Ranks, list[Restored]]:
        say = self._narrator.say
        self._narrator.title("Act 2: the same training with ckptd on two nodes, and one rank dies")
        say(f"{NODES} nodes on this machine, each with {RANKS_PER_NODE} ranks, a daemon and an arena of its own")
        say("the daemons make parity for each other while training goes on")
        say(f"the drain is slowed to {_SLOW_RATE}, so that act 3 can hit one in the middle")
        places = [self._first, self._lost]
        first = self._start("act 2", places, slow=True)
        self._follow(first, until=self._plan.kill_rank_after)
        self._narrator.show("status", "--nodes", "--arena", self._first.arena)
        say(f"[bold red]kill -9[/] {first.pids[_VICTIM]}, which is rank {_VICTIM}")
        codes = first.kill(_VICTIM)
        say(f"the ranks have ended with exit codes {codes}; the daemons live; the launcher starts again")
        second = self._start("act 2, restarted", places, slow=True)
        promised = promises.newest(first.records, "staged")
        restored = self._restored(second, promised, "staged", ["arena"] * WORLD_SIZE)
        self._follow(second, until=self._plan.lose_node_after)
        return first, second, restored

    def _act_3(self, second: Ranks) -> tuple[Ranks, list[Restored]]:
        say = self._narrator.say
        self._narrator.title("Act 3: everything dies in the middle of a drain, and one node is lost with its memory")
        say("watching [bold]ckptd status --json[/] for a drain under way, of a checkpoint that is protected")
        daemons, drain = kill_in_drain(self._space, [self._first, self._lost], second.pids)
        codes = second.reap()
        self._lost.lose_memory()
        last = max(report.losses(second.records[0]))
        promised = promises.newest(second.records, "protected", reported=drain.save.step)
        percent = 100 * drain.nbytes_done / drain.nbytes
        say(f"the training was at step {last}; newest checkpoint reported protected: step {promised}")
        pids = " ".join(map(str, [*second.pids, *daemons]))
        say(f"[bold red]kill -9[/] {pids}: ranks and daemons; exit codes of the ranks {codes}")
        say(f"[bold red]rm -r[/] {self._lost.arena}: the memory of {self._lost.name}, whose ranks were 2 and 3")
        say(f"the drain of step {drain.save.step} had {percent:.0f} % of its bytes on disk")
        self._narrator.show("status", "--arena", self._first.arena, expected=_NO_DAEMON)
        self._narrator.show("list", self._space.store)
        say(f"the launcher starts again, ranks 2 and 3 on {self._spare.name} now, which has never seen this training")
        say("the first rank on each node starts a daemon, its drain at full speed")
        third = self._start("act 3, restarted", [self._first, self._spare])
        tiers = ["arena"] * RANKS_PER_NODE + ["rebuilt"] * RANKS_PER_NODE
        restored = self._restored(third, promised, "protected", tiers)
        self._follow(third, until=self._plan.steps - self._plan.save_every)
        self._narrator.show("status", "--nodes", "--arena", self._first.arena)
        self._follow(third)
        return third, restored

    def _epilogue(
        self, reference: Ranks, slowed: list[Ranks], third: Ranks, restores: list[tuple[str, list[Restored]]]
    ) -> None:
        say = self._narrator.say
        self._narrator.title("The proof")
        self._narrator.show("list", self._space.store)
        self._narrator.show("verify", self._space.store)
        attempts = [(ranks.name, ranks.records) for ranks in (*slowed, third)]
        curve = report.join(reference.records, attempts, self._plan.steps)
        self._narrator.print(report.curve_table(reference.records, curve))
        say(
            f"[bold green]the loss curve equals the uninterrupted run's, bit for bit:[/] {len(curve.points)} steps, "
            f"{curve.repeated} of them run twice"
        )
        say(f"{curve.compared} losses were compared, over all ranks and starts, and the weights at the end")
        say(f"digest of the weights {curve.digest}")
        if not self._space.wait_until_empty():
            raise DemoError("the job is closed and durable, yet a daemon has not left")
        say("the daemons have left by themselves: clients had started them, and the job is closed and durable")
        self._aftermath([*slowed, third])
        self._narrator.title("The numbers")
        measured = report.Measured(reference.records, [r.records for r in slowed], [third.records], restores)
        self._narrator.print(measured.table(_SLOW_RATE))
        for note in measured.notes():
            self._narrator.print(Text(note, style="dim"))
        self._narrator.blank()
        say("[bold green]It holds:[/] the training was killed twice, and came back twice from memory, the second time")
        say("though a node's memory was gone; it ended as the one that nobody disturbed:")
        say(f"{curve.compared} losses and the weights at the end are equal, bit for bit")

    def _aftermath(self, starts: Sequence[Ranks]) -> None:
        """All processes are gone: the store alone says what happened, and as the ranks have it."""
        self._narrator.title("What is left to look at")
        job = f"{self._space.store}/{JOB}"
        self._narrator.show("status", job, "--arena", self._first.arena)
        self._narrator.show("history", job)
        self._narrator.show("advise", job)
        attempts = [
            told.Attempt(ranks.records, how, ranks.began, ranks.ended or time.time())
            for ranks, how in zip(starts, _ENDS, strict=True)
        ]
        summary = told.check_history(self._told("history", job, "--saves"), attempts, NODES)
        told.check_advice(self._told("advise", job), attempts)
        told.check_state(self._told("status", job, "--arena", self._first.arena), self._plan.steps)
        self._narrator.say(f"[bold green]each figure agrees with the ranks' own records:[/] {summary}")
        if importlib.util.find_spec("matplotlib") is None:
            self._narrator.say("ckptd report draws them as a page: pip install 'ckptd[report]'")
        else:
            self._narrator.show("report", job, "-o", self._space.path("report.html"))

    def _told(self, *args: str) -> told.Json:
        code, output = ckptd(self._space, *args, "--json", columns=80, color=False)
        if code:
            raise DemoError(f"ckptd {args[0]} --json ended with exit code {code}: {output}")
        found: told.Json = json.loads(output)
        return found

    def _start(self, name: str, places: Sequence[Node], *, slow: bool = False) -> Ranks:
        settings = {"CKPTD_DRAIN_BANDWIDTH": _SLOW_DRAIN} if slow else {}
        return Ranks(name, self._space, self._plan, places=places, settings=settings)

    def _follow(self, ranks: Ranks, *, until: int | None = None) -> None:
        """Prints records until the loss of step ``until`` is known, or until the training ends."""
        for record in ranks.follow():
            self._narrator.step(record, ranks)
            if isinstance(record, Loss) and record.step == until:
                return
        if until is not None:
            raise DemoError(f"{ranks.name}: the training ended before step {until}")

    def _restored(self, ranks: Ranks, promised: int, milestone: str, tiers: Sequence[str]) -> list[Restored]:
        """The checkpoints that the ranks restored, by rank. Raises DemoError unless step and tiers are as promised."""
        for record in ranks.follow():
            if isinstance(record, Loss):  # a loss of all ranks: each has restored
                break
        restored = promises.restored(ranks.records)
        promises.check(restored, promised, milestone, tiers)
        step = restored[0].step
        for tier, count, slowest in report.routes(restored):
            self._narrator.say(
                f"[bold green]restored[/] step {step} from tier [bold]{tier}[/], {count} ranks in {slowest}"
            )
        return restored
