"""``ckptd scrub``: committed checkpoints read again at a bounded rate, what is damaged made good if it can be."""

import os
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import click
import msgspec

from ckptd.checkpoint.repair.run import rebuild
from ckptd.checkpoint.report import Problem
from ckptd.checkpoint.scrub import scrub_piece
from ckptd.checkpoint.throttle import Throttle
from ckptd.cli import common
from ckptd.cli.counting import Count, counting
from ckptd.cli.scrub_state import ScrubState, default_path
from ckptd.core.coordinator.scrub_order import Read, next_of
from ckptd.shared.base.errors import CkptdError, DamagedError, UsageError
from ckptd.shared.base.ids import JobKey, is_job_name, parse_dirname, rank_of_image
from ckptd.shared.format.committed import identify
from ckptd.shared.format.digest import BLOCK_NBYTES
from ckptd.shared.format.integrity import XXH3, Integrity
from ckptd.shared.protocol.scrubbing import BEGIN
from ckptd.shared.stores.kinds import absolute, open_files
from ckptd.store.opening import jobs_at, open_store
from ckptd.system import human
from ckptd.system.config import load_config
from ckptd.system.units import parse_size

SCHEMA = 1
_RATE = 64 << 20
_PIECE_NBYTES = 16 * BLOCK_NBYTES
_HINT = "give a job, its directory, a store, a checkpoint, or --all"


class Scrubbed(msgspec.Struct, kw_only=True):
    """A checkpoint of which something was read. ok: nothing of that is damaged now; complete: it was all of it."""

    path: str
    step: int
    ok: bool = True
    nbytes: int = 0
    complete: bool = False
    problems: list[Problem] = []
    mended: list[str] = []
    why: str = ""  # the rest is not mended

    def judge(self) -> None:
        """What was found, and mended, counts."""
        self.ok = not self.problems or (bool(self.mended) and not self.why)


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """What --json prints."""

    schema: int = SCHEMA
    ok: bool
    seconds: float
    nbytes: int
    checkpoints: list[Scrubbed]
    recent: int  # that were read within --every, and not again
    left: int  # that are due, and were not reached
    notes: list[str]
    state: str


class _Found(NamedTuple):
    path: str
    step: int


@click.command(
    epilog=common.example("ckptd scrub /scratch/$USER/ckpt/llama-7b --rate 200M", "ckptd scrub --all --for 2h")
)
@click.argument("target", metavar="[JOB|PATH]", required=False)
@click.option("--all", "everything", is_flag=True, help="All jobs of the store of the settings, or of --store.")
@click.option("--store", metavar="DIR", help="Where JOB is.  [CKPTD_STORE; the setting]")
@click.option("--rate", metavar="SIZE", help="Bytes per second, such as 200M.  [CKPTD_SCRUB_STORE; 64M]")
@click.option("--every", metavar="TIME", default="7d", show_default=True, help="Pass over what was read since then.")
@click.option("--for", "limit", metavar="TIME", help="Stop after that, such as 2h; the next scrub continues.")
@click.option("--state", metavar="FILE", help="Where it is kept how far this is.  [~/.local/state/ckptd/scrub.json]")
@click.option("--no-repair", is_flag=True, help="Change nothing on the store.")
@common.json_option
@common.integrity_options
def command(  # noqa: PLR0913, PLR0917 - a flag each
    target: str | None, everything: bool, store: str | None, rate: str | None, every: str, limit: str | None,
    state: str | None, no_repair: bool, as_json: bool, integrity: Integrity,
) -> int:  # fmt: skip
    """Read committed checkpoints again, past the page cache, at a bounded rate, and compare each byte with its digest.

    It continues where the last one ended; what was never read comes first. Damaged images are made again from parity,
    as by ckptd rebuild; a daemon whose memory holds the checkpoint does it from there (setting scrub_store).

    Exit code 1 if something is damaged now.
    """
    every_s, limit_s = _seconds("--every", every), _seconds("--for", limit) if limit is not None else None
    work = _Scrub(_rate(rate), integrity, ScrubState(state or default_path()), repair=not no_repair)
    with common.store_errors(), counting("scrubbing", quiet=as_json) as progress:
        work.run(_found(target, store, everything=everything), every_s, limit_s, progress)
    output = work.output()
    if as_json:
        common.print_json(output)
    else:
        _tell(output, every)
    return int(not output.ok)


def _seconds(flag: str, text: str) -> float:
    try:
        return common.seconds_of(text)
    except UsageError as error:
        raise UsageError(error.message.replace("--timeout", flag), hint='such as "90s", "2h" or "7d"') from None


def _rate(text: str | None) -> int:
    if text is None:
        return load_config({})[0].scrub_store or _RATE
    try:
        nbytes = parse_size(text.removesuffix("/s"))
    except ValueError as error:
        raise UsageError(f"--rate: {error}", hint="such as 200M: bytes per second") from None
    if not nbytes:
        raise UsageError("--rate: nothing would be read at 0 bytes per second", hint="such as 200M")
    return nbytes


def _found(target: str | None, store: str | None, *, everything: bool) -> dict[str, dict[str, _Found]]:
    """By location, what is to be read there: name in the state, and where."""
    if (target is None) != everything:
        raise UsageError("nothing to scrub is named" if target is None else "--all, or one target", hint=_HINT)
    if target is None or (is_job_name(target) and (store is not None or not os.path.isdir(target))):
        place = store or load_config({})[0].store
        if place is None:
            raise UsageError("there is no store in the settings", hint=f"--store DIR; or {_HINT}")
        target = absolute(place) if target is None else f"{absolute(place)}/{target}"
    path = absolute(target)
    if parse_dirname(os.path.basename(os.path.realpath(path))) is not None:
        real = os.path.realpath(path)
        return {real: dict(_named(real, _save_of(real)))}
    return {f"{key.store}/{key.job}/": dict(_of_job(key)) for key in jobs_at(path)}


def _save_of(path: str) -> str:
    """Empty for one whose records say nothing."""
    try:
        return identify(open_files(path, XXH3)).save.text
    except DamagedError:
        return ""


def _named(path: str, save: str) -> Iterator[tuple[str, _Found]]:
    step, _ = parse_dirname(os.path.basename(path)) or (0, 0)
    yield f"{path}#{save}", _Found(path, step)


def _of_job(key: JobKey) -> Iterator[tuple[str, _Found]]:
    """Newest first. One whose record cannot be read is looked at each time."""
    store = open_store(key.store, XXH3)
    saves = {entry.dirname: entry.committed.save.text for entry in store.scan(key.job).committed}
    for name in store.names(key.job):
        yield from _named(f"{key.store}/{key.job}/{name}", saves.get(name, ""))


class _Scrub:
    """Reads, and mends."""

    def __init__(self, rate: int, integrity: Integrity, state: ScrubState, *, repair: bool) -> None:
        self._rate, self._integrity, self._state, self._repair = rate, integrity, state, repair
        self._began_s = time.monotonic()
        self._nbytes = 0
        self._done: dict[str, Scrubbed] = {}
        self._left, self._recent = 0, 0

    def run(self, found: dict[str, dict[str, _Found]], every_s: float, limit_s: float | None, progress: Count) -> None:
        """Until all was read, or the time is over."""
        for below, names in found.items():
            self._state.keep_only(names, below)
        places = {name: one for names in found.values() for name, one in names.items()}
        reads = {name: self._state.read.get(name, Read()) for name in places}
        throttle = Throttle(self._rate)
        try:
            while (name := next_of(reads, time.time(), every_s)) is not None:
                if limit_s is not None and time.monotonic() - self._began_s >= limit_s:
                    break
                reads[name] = self._read(places[name], reads[name], throttle, progress)
                self._keep(name, reads[name], places[name].path)
                if reads[name].place is None:
                    del reads[name]
            self._mend(one for one in self._done.values() if not one.complete)
        finally:
            self._state.save(now=True)
        self._left = sum(next_of({name: read}, time.time(), every_s) is not None for name, read in reads.items())
        self._recent = len(reads) - self._left

    def _keep(self, name: str, read: Read, path: str) -> None:
        """For the next scrub. What is damaged is not behind us: it is read, and said, again."""
        one = self._done.get(path)
        if read.place is None and one is not None:
            self._mend([one])
        self._state.read[name] = read if one is None or one.ok or read.place is not None else Read()
        self._state.save()

    def _read(self, found: _Found, read: Read, throttle: Throttle, progress: Count) -> Read:
        nbytes = max(BLOCK_NBYTES, min(self._rate, _PIECE_NBYTES))

        def count(done: int) -> None:
            throttle(self._nbytes + done)
            progress(self._nbytes + done)

        piece = scrub_piece(found.path, read.place or BEGIN, nbytes, self._integrity, count)
        self._nbytes += piece.nbytes
        if piece.gone:
            self._done.pop(found.path, None)
            return Read(time.time())
        one = self._done.setdefault(found.path, Scrubbed(path=found.path, step=found.step, problems=[], mended=[]))
        one.nbytes += piece.nbytes
        one.complete = piece.next is None
        one.problems += [problem for problem in piece.problems if problem not in one.problems]
        one.judge()
        return Read(time.time()) if piece.next is None else read._replace(place=piece.next)

    def _mend(self, damaged: Iterable[Scrubbed]) -> None:
        for one in damaged:
            if one.problems and self._repair:
                self._mend_one(one)
                one.judge()

    def _mend_one(self, one: Scrubbed) -> None:
        others = [p for p in one.problems if rank_of_image(os.path.basename(p.path)) is None]
        try:
            outcome = rebuild(one.path, Throttle(self._rate), self._integrity, cached=False)
        except CkptdError as error:
            one.why = error.message
            return
        one.mended = outcome.rebuilt
        lost = [f"{lost.path}: {lost.what}" for lost in outcome.lost]
        left = [p.path for p in others if p.path not in outcome.rebuilt]
        one.why = "; ".join(lost) or (f"{left[0]} is no image and no parity" if left else "")

    def output(self) -> Output:
        """All that was found."""
        checkpoints = list(self._done.values())
        return Output(
            ok=all(one.ok for one in checkpoints), seconds=time.monotonic() - self._began_s, nbytes=self._nbytes,
            checkpoints=checkpoints, recent=self._recent, left=self._left,
            notes=[self._state.problem] if self._state.problem else [], state=self._state.path,
        )  # fmt: skip


def _tell(output: Output, every: str) -> None:
    """One line each, never wrapped: they are for grep as well."""
    for one in output.checkpoints:
        for problem in one.problems:
            click.echo(f"{click.style('damaged:', 'red')} {human.printable(str(problem))}")
        for path in one.mended:
            click.echo(f"{click.style('mended:', 'green')} {human.printable(path)}")
        if one.problems and not one.ok:
            why = human.printable(one.why or "looked at only: --no-repair, or not read to its end yet")
            click.echo(f"{click.style('not mended:', 'red')} {why}")
    for note in output.notes:
        click.echo(f"{click.style('note:', dim=True)} {human.printable(note)}")
    bad = sum(not one.ok for one in output.checkpoints)
    verdict = f"{bad} damaged" if bad else "nothing is damaged"
    if any(one.mended for one in output.checkpoints):
        verdict += ", what was is mended" if not bad else ""
    speed = human.rate(output.nbytes / output.seconds) if output.seconds else "-"
    rest = f"; {output.recent} read within {every}" if output.recent else ""
    rest += f"; {output.left} left for the next scrub" if output.left else ""
    click.echo(
        f"{human.counted(len(output.checkpoints), 'checkpoint')}, {human.size(output.nbytes)} in "
        f"{human.duration(output.seconds)} ({speed}): {verdict}{rest}"
    )
