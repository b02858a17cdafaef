"""The story: a training left alone, the same training killed twice, and the proof that both are one."""

import time

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text

from ckptd_client.demo import report
from ckptd_client.demo.daemon import ckptd, kill_in_drain
from ckptd_client.demo.errors import DemoError
from ckptd_client.demo.journal import Loss, Reached, Record, Restored, Saved, TorchSaved
from ckptd_client.demo.plan import WORLD_SIZE, Plan
from ckptd_client.demo.ranks import Ranks
from ckptd_client.demo.workspace import Workspace

_SLOW_DRAIN = "32MiB"  # per second: slow enough to be hit in the middle
_SLOW_RATE = "32 MiB/s"
_VICTIM = WORLD_SIZE - 1
_INDENT = 4
_NO_DAEMON = 3  # exit code of ckptd status


class Story:
    """Three acts and an epilogue, told on console while they happen."""

    def __init__(self, console: Console, space: Workspace, plan: Plan) -> None:
        self._console = console
        self._space = space
        self._plan = plan
        self._began = time.monotonic()

    def tell(self) -> None:
        """Runs it all. Raises DemoError when anything is not as promised."""
        reference = self._act_1()
        first, second, after_rank = self._act_2()
        third, after_all = self._act_3(second)
        self._epilogue(
            reference, [first, second], third, [("one rank's death", after_rank), ("everything's death", after_all)]
        )

    def _act_1(self) -> Ranks:
        self._title("Act 1: a training that nobody disturbs")
        every = self._plan.save_every
        self._say(
            f"{WORLD_SIZE} ranks train a small GPT on Python's own source; every {every} steps torch.save is timed"
        )
        ranks = self._start("act 1", ckptd=False)
        for record in ranks.follow():
            self._tell_step(record, ranks)
        return ranks

    def _act_2(self) -> tuple[Ranks, Ranks, Restored]:
        self._title("Act 2: the same training with ckptd, and one rank dies")
        self._say(f"the drain is slowed to {_SLOW_RATE}, so that act 3 can hit one in the middle")
        first = self._start("act 2", slow=True)
        self._follow_until(first, self._plan.kill_rank_after)
        self._show("status", "--arena", self._space.arena)
        self._say(f"[bold red]kill -9[/] {first.pids[_VICTIM]}, which is rank {_VICTIM}")
        codes = first.kill(_VICTIM)
        self._say(
            f"the ranks have ended with exit codes {codes}; the daemon lives; the launcher starts the ranks again"
        )
        second = self._start("act 2, restarted", slow=True)
        restored = self._restored(second, first)
        self._follow_until(second, self._plan.kill_all_after)
        return first, second, restored

    def _act_3(self, second: Ranks) -> tuple[Ranks, Restored]:
        self._title("Act 3: everything dies in the middle of a drain")
        self._say("watching [bold]ckptd status --json[/] for a drain under way")
        pid, job = kill_in_drain(self._space)
        codes = second.kill_all()
        self._tell_rest(second)
        self._say(f"[bold red]kill -9[/] {pid} {' '.join(map(str, second.pids))}: daemon and ranks; exit codes {codes}")
        if job.drain is not None:
            percent = 100 * job.drain.nbytes_done / job.drain.nbytes
            self._say(f"the drain of step {job.drain.save.step} had {percent:.0f} % on disk")
        self._show("status", "--arena", self._space.arena, expected=_NO_DAEMON)
        self._show("list", self._space.store)
        self._say("the launcher starts the ranks again; the first to come starts a daemon, its drain at full speed now")
        third = self._start("act 3, restarted")
        restored = self._restored(third, second)
        self._follow_until(third, self._plan.steps - self._plan.save_every)
        self._show("status", "--arena", self._space.arena)
        for record in third.follow():
            self._tell_step(record, third)
        return third, restored

    def _epilogue(
        self, reference: Ranks, slowed: list[Ranks], third: Ranks, restores: list[tuple[str, Restored]]
    ) -> None:
        self._title("The proof")
        self._show("list", self._space.store)
        self._show("verify", self._space.store)
        attempts = [(ranks.name, ranks.records) for ranks in (*slowed, third)]
        curve = report.join(reference.records, attempts, self._plan.steps)
        self._print(report.curve_table(reference.records, curve))
        self._say(
            f"[bold green]the loss curve equals the uninterrupted run's, bit for bit:[/] {len(curve.points)} steps, "
            f"{curve.repeated} of them run twice"
        )
        self._say(
            f"{curve.compared} losses were compared, over all ranks and starts, and the weights at the end: "
            f"digest {curve.digest}"
        )
        if not self._space.wait_until_empty():
            raise DemoError("the job is closed and durable, yet its daemon has not left")
        self._say("the daemon has left by itself: a client had started it, and its last job is closed and durable")
        self._title("The numbers")
        measured = report.Measured(reference.records, [r.records for r in slowed], [third.records], restores)
        self._print(measured.table(_SLOW_RATE))
        for note in measured.notes():
            self._print(Text(note, style="dim"))
        self._console.print()
        self._say(
            "[bold green]It holds:[/] killed twice, the training came back from memory twice, and ended as the one "
            f"that nobody disturbed: {curve.compared} losses and the weights at the end are equal, bit for bit"
        )

    def _start(self, name: str, *, ckptd: bool = True, slow: bool = False) -> Ranks:
        settings = {"CKPTD_DRAIN_BANDWIDTH": _SLOW_DRAIN} if slow else {}
        return Ranks(name, self._space, self._plan, arena=self._space.arena if ckptd else None, settings=settings)

    def _follow_until(self, ranks: Ranks, step: int) -> None:
        """Returns when step's loss is known."""
        for record in ranks.follow():
            self._tell_step(record, ranks)
            if isinstance(record, Loss) and record.step == step:
                return
        raise DemoError(f"{ranks.name}: the training ended before step {step}")

    def _restored(self, ranks: Ranks, killed: Ranks) -> Restored:
        """What ranks went on from. Raises DemoError unless that came from memory and is what was promised, or newer."""
        for record in ranks.follow():
            if isinstance(record, Loss):
                break
            if isinstance(record, Restored):
                self._check_restored(record, killed)
                ms = report.ms([record.seconds])
                self._say(f"[bold green]restored[/] step {record.step} from tier [bold]{record.tier}[/] in {ms}")
                return record
        raise DemoError(
            f"{ranks.name}: the training began from nothing, though step {_newest_staged(killed)} was staged"
        )

    @staticmethod
    def _check_restored(restored: Restored, killed: Ranks) -> None:
        promised = _newest_staged(killed)
        if restored.step < promised:
            raise DemoError(f"step {promised} was reported staged, but step {restored.step} came back")
        if restored.tier != "arena":
            raise DemoError(f"step {restored.step} came from {restored.tier}, though the arena was never lost")

    def _tell_rest(self, ranks: Ranks) -> None:
        """Tells what rank 0 said while nobody listened."""
        last = max(report.losses(ranks.records[0]))
        self._say(f"the training was at step {last}; newest checkpoint reported staged: step {_newest_staged(ranks)}")

    def _tell_step(self, record: Record, ranks: Ranks) -> None:
        match record:
            case Saved(step=step, stall_s=seconds):
                what = f"ckptd took it over in {report.ms([seconds])}"
            case TorchSaved(step=step, seconds=seconds, synced_s=synced_s):
                what = f"torch.save: {report.ms([seconds])}, with fsync {report.ms([synced_s])}"
            case _:
                return
        loss = float.fromhex(report.losses(ranks.records[0])[step])
        self._say(f"step {step:3}  loss {loss:.4f}  [dim]{what}[/]")

    def _title(self, text: str) -> None:
        self._console.print()
        self._console.rule(f"[bold]{text}", align="left")

    def _say(self, text: str) -> None:
        self._console.print(f"[dim]{time.monotonic() - self._began:5.1f} s[/]  {text}")

    def _show(self, *args: str, expected: int = 0) -> None:
        """Runs a ckptd command and prints it with its output. Raises DemoError when it ends with another exit code."""
        color = self._console.is_terminal and not self._console.no_color
        code, output = ckptd(self._space, *args, columns=self._console.width - _INDENT, color=color)
        self._say(f"[bold]$ ckptd {' '.join(args)}[/]")
        self._print(Text.from_ansi(output))
        if code != expected:
            raise DemoError(f"ckptd {args[0]} ended with exit code {code}, not {expected}")

    def _print(self, what: RenderableType) -> None:
        self._console.print(Padding(what, (0, 0, 0, _INDENT), expand=False))


def _newest_staged(ranks: Ranks) -> int:
    """Newest step that any rank reported staged. Raises DemoError if there is none."""
    records = (record for rank in ranks.records for record in rank)
    steps = [record.step for record in records if isinstance(record, Reached) and record.milestone == "staged"]
    if not steps:
        raise DemoError(f"{ranks.name}: no checkpoint was reported staged")
    return max(steps)
