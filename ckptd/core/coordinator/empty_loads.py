"""What a load answers when no checkpoint can be restored. Pure.

A job starts from nothing only where nothing was there, or where all that was there was staged only: no loss of a node
was promised to spare that. Whatever was protected or durable, or is there and damaged, is an error that says what to
type.
"""

import difflib
from collections.abc import Sequence
from typing import NamedTuple

from ckptd.core import events as ev
from ckptd.core.coordinator.locations import Routes
from ckptd.shared.base.ids import JobKey, RunId, SaveId
from ckptd.shared.format.integrity import asks_for_key

_MOST_REASONS = 3  # why the newest checkpoints cannot be restored
_MOST_NOTES = 4  # of a load: where the newest two checkpoints are damaged, in memory and on the store


class Refusal(NamedTuple):
    """The load fails."""

    message: str
    hint: str


class Reason(NamedTuple):
    """Why a checkpoint cannot be restored."""

    text: str
    lost: bool  # a part of it is nowhere, and none is damaged: no other start of the job finds it


class Asked(NamedTuple):
    """Which checkpoint the ranks want; None: the newest, of whichever run."""

    step: int | None
    run: RunId | None


class Found(NamedTuple):
    """What the coordinator looked at."""

    candidates: Sequence[SaveId]  # newest first; none can be restored
    reasons: Sequence[Reason]  # why not
    notes: Sequence[str]  # of the load
    foreign: Sequence[str]  # of these notes, which are of other runs and say nothing of this one
    scan: ev.StoreScanned | None


def answer(job: JobKey, asked: Asked, found: Found, routes: Routes) -> Refusal | list[str]:
    """An error, or the notes of a load that restores nothing."""
    told = [reason.text for reason in found.reasons[:_MOST_REASONS]]
    if len(found.reasons) > _MOST_REASONS:
        told.append(f"and {len(found.reasons) - _MOST_REASONS} older ones")
    silent = found.scan.problem if found.scan is not None else ""
    named = asked != (None, None)
    if found.candidates:
        scan_is_clean = found.scan is not None and not silent and not found.scan.notes
        lost = all(reason.lost for reason in found.reasons)
        if lost and scan_is_clean and not named and not any(map(routes.outlived_a_node, found.candidates)):
            return [*found.notes, *(f"lost, and it was staged only: {text}" for text in told)]
        return _refusal(job, found, told, _how_to_go_on(job, found, routes))
    if silent:
        text = f"cannot tell whether there is a checkpoint: the store did not answer: {silent}"
        return Refusal(text, f"check {job.store}, then start again")
    if asked.run is not None:
        text = f"nothing of run {asked.run.hex()} lies on the store or on a node that answers"
        return Refusal(text, f"ckptd list {_path(job)}, or start its nodes with the job")
    blank = found.scan is not None and not found.scan.committed
    elsewhere = _elsewhere(job, found.scan) if found.scan is not None and blank else []
    if asked.step is not None:
        text, hint = f"there is no checkpoint of step {asked.step}", f"ckptd list {_path(job)}, or client.steps()"
        return Refusal("; ".join([text, *(one.text for one in elsewhere)]), elsewhere[0].hint if elsewhere else hint)
    if set(found.notes) - set(found.foreign):
        return _refusal(job, found, [], _cure(job, found))
    return [*found.notes, *(f"{one.text}: {one.hint}" for one in elsewhere)]


class _Elsewhere(NamedTuple):
    """Where the checkpoint may be that the user means, and what to type then."""

    text: str
    hint: str


def _elsewhere(job: JobKey, scan: ev.StoreScanned) -> list[_Elsewhere]:
    """In the store that the job had before; only where that is the same, under another name.

    Jobs of another store are not this user's misspelt one: a user who continues from one of them loads another model.
    """
    if scan.former:
        ids = f"id {scan.former[0]}" if len(scan.former) == 1 else f"ids {', '.join(scan.former)}"
        text = f"checkpoints in the store with {ids}, to which job {job.job!r} was saved before, are not seen"
        now = f"{job.store} is now the store with id {scan.store_id}"
        return [_Elsewhere(f"{text}; {now}", "mount the file system that the job had, or connect(store=...)")]
    if not scan.others:
        return []
    text = f"no checkpoint of job {job.job!r} lies in {job.store}, which has {', '.join(scan.others)}"
    meant = difflib.get_close_matches(job.job, [other.partition(" ")[0] for other in scan.others], n=1)
    if meant:
        return [_Elsewhere(text, f"if {meant[0]!r} is meant, connect(job={meant[0]!r})")]
    return [_Elsewhere(text, "if one of these is meant, give its name: connect(job=...)")]


def _refusal(job: JobKey, found: Found, told: Sequence[str], hint: str) -> Refusal:
    more = len(found.notes) - _MOST_NOTES
    rest = [f"and {more} more: ckptd verify {_path(job)}"] if more > 0 else []
    return Refusal("no checkpoint can be restored: " + "; ".join([*found.notes[:_MOST_NOTES], *rest, *told]), hint)


def _path(job: JobKey) -> str:
    return f"{job.store}/{job.job}"


def _verify(job: JobKey, notes: Sequence[str]) -> str:
    if any(map(asks_for_key, notes)):
        return f"connect(integrity_key_file=FILE); ckptd verify --key FILE {_path(job)}"
    return f"ckptd verify {_path(job)}"


def _cure(job: JobKey, found: Found) -> str:
    """What is to be typed against what a look at the store found wrong; else where all of it is shown."""
    cures = list(dict.fromkeys(found.scan.cures)) if found.scan is not None else []
    return cures[0] if cures else _verify(job, found.notes)


def _how_to_go_on(job: JobKey, found: Found, routes: Routes) -> str:
    on_store = [save for save in found.candidates if routes.on_store(save)]
    if on_store:
        if any(map(asks_for_key, found.notes)):
            return _verify(job, found.notes)
        path = _path(job)
        return (
            f"{_verify(job, found.notes)} shows all that is wrong; where parity was drained, it is mended by: "
            f"ckptd rebuild {path}/{on_store[0].dirname}; to start from nothing: mv {path} {path}~"
        )
    return f"bring lost nodes back, or give up what is left in memory: ckptd forget {job.job}"
