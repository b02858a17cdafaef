"""What a load came to, judged by the bytes that each rank got. Pure."""

import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from ckptd.shared.base import errors
from tests.faults.campaigns import Answer

Saved = tuple[int, int]  # run and step; runs are numbered as they began

GOOD = ("good", "none", "error")
_OURS = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.CkptdError)}
_NAMES = re.compile(r"\bsteps? \d|\branks? \d|\bincarnation \d|\brun [0-9a-f]|\bstore\b|\bnode \w|/\w")


@dataclass(frozen=True)
class Facts:
    """What is known of the job when a load begins."""

    saved: AbstractSet[Saved] = frozenset()  # of which save was called on all ranks
    promised: AbstractSet[Saved] = frozenset()  # no older one may come


@dataclass(frozen=True)
class Verdict:
    """A class, and what was seen.

    good: one checkpoint of one run. none: nothing on any rank. error: each rank said what is missing. Findings are:
    mixed: bytes of two checkpoints. torn: bytes that nobody saved. split: some ranks loaded and others did not.
    stale: an older checkpoint than the newest that was promised. lost: nothing, though one was promised.
    unnamed: an error that names nothing. stuck: no answer.
    """

    kind: str
    text: str = ""
    found: Saved | None = None
    tiers: Sequence[str] = ()
    notes: Sequence[str] = ()
    errors: Sequence[str] = field(default=())  # their classes

    @property
    def is_finding(self) -> bool:
        """Whether a promise is broken."""
        return self.kind not in GOOD

    def __str__(self) -> str:
        what = f"run {self.found[0]} step {self.found[1]} of {'/'.join(self.tiers)}" if self.found else self.text
        return f"{self.kind} ({what})" if what else self.kind


def judge(said: Sequence[Answer], facts: Facts) -> Verdict:
    """The verdict on what the ranks, in order, said of a load, or of the connect that failed before it."""
    failed = [answer for answer in said if answer.kind]
    if any(answer.kind == "stuck" for answer in failed):
        return Verdict("stuck", "; ".join(f"{answer.kind}: {answer.text}" for answer in said))
    if failed:
        return _of_errors(said, failed)
    loaded = [answer.value for answer in said if answer.value is not None]
    if not loaded:
        newest = max(facts.promised, default=None)
        return Verdict("lost", f"nothing, run {newest[0]} step {newest[1]} is promised") if newest else Verdict("none")
    if len(loaded) < len(said):
        return Verdict("split", f"nothing on some ranks: {[answer.value for answer in said]}")
    return _of_bytes(loaded, facts)


def _of_errors(said: Sequence[Answer], failed: Sequence[Answer]) -> Verdict:
    text = " | ".join(answer.text for answer in failed)
    kinds = tuple(answer.kind for answer in failed)
    if len(failed) < len(said):
        return Verdict("split", f"some ranks failed, others did not: {text}", errors=kinds)
    if any(answer.kind not in _OURS or not _NAMES.search(answer.text) for answer in failed):
        return Verdict("unnamed", text, errors=kinds)
    return Verdict("error", text, errors=kinds)


def _of_bytes(loaded: Sequence[Mapping[str, Any]], facts: Facts) -> Verdict:
    tiers = [found["tier"] for found in loaded]
    notes = [note for found in loaded for note in found["notes"]]
    marks = [(rank, *mark) for rank, found in enumerate(loaded) for mark in found["marks"]]
    seen = {(run, step) for _, run, _, step in marks}
    text = f"by rank: {[found['marks'] for found in loaded]}, tiers {tiers}, notes {notes}"
    if len(seen) > 1:
        return Verdict("mixed", text, tiers=tiers, notes=notes)
    found = seen.pop()
    whose = all(rank == owner for rank, _, owner, _ in marks)
    told = {item["step"] for item in loaded} == {found[1]}
    if found not in facts.saved or not whose or not told or not all(item["intact"] for item in loaded):
        return Verdict("torn", f"{text}, told {[item['step'] for item in loaded]}", tiers=tiers, notes=notes)
    newest = max(facts.promised, default=found)
    if found < newest:
        stale = f"run {found[0]} step {found[1]} of {'/'.join(tiers)}, run {newest[0]} step {newest[1]} is promised"
        return Verdict("stale", f"{stale}, notes {notes}", None, tiers, notes)
    return Verdict("good", "", found, tiers, notes)
