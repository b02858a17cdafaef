"""The rebuild as a whole: look at every block, solve for those that are damaged, write, compare, rename."""

import importlib.util
import os
import time
from collections.abc import Callable, Iterable

import msgspec
from msgspec.structs import replace

from ckptd.checkpoint.repair.checkpoint import Checkpoint, Lost, Set, held_checkpoint, tails
from ckptd.checkpoint.repair.files import Bytes, FileSources, OpenFiles, block_buffer
from ckptd.checkpoint.repair.plan import Bad, Fix, solve
from ckptd.checkpoint.repair.plan import Target as Key
from ckptd.checkpoint.repair.target import Target
from ckptd.checkpoint.report import ignore
from ckptd.parity.code import code_of
from ckptd.parity.engine import Pull
from ckptd.parity.plan import Task
from ckptd.parity.record import encode_record
from ckptd.parity.streams import start_of
from ckptd.parity.table import Table
from ckptd.shared.base.errors import CkptdError, DamagedError, UsageError
from ckptd.shared.base.ids import JobKey, file_name
from ckptd.shared.base.wording import named_ranks
from ckptd.shared.format.integrity import XXH3, Integrity, Purpose
from ckptd.shared.format.slot import PAGE
from ckptd.store.interface import Held
from ckptd.store.opening import open_store
from ckptd.system.units import format_size

_SLICE_NBYTES = 1 << 20
_MEMORY_NBYTES = 16 << 20
_SHOWN = 6


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What was found and done. rebuilt: paths with their names in place; empty when nothing was damaged."""

    path: str
    damaged: list[str]
    rebuilt: list[str]
    lost: list[Lost]
    notes: list[str]
    nbytes: int  # read to look for damage
    seconds: float


def rebuild(
    path: str, progress: Callable[[int], None] = ignore, integrity: Integrity = XXH3, *, cached: bool = True
) -> Outcome:
    """Mends the committed checkpoint in the directory path from its drained parity. Sound files are not touched.

    progress gets the bytes read and written so far; cached: they are read as OpenFiles does it. Raises UsageError,
    DamagedError or another CkptdError; what was cut off leaves hidden files only, which the next rebuild removes.
    """
    began_s = time.monotonic()
    try:
        with (
            held_checkpoint(path, integrity, cached=cached) as (checkpoint, held),
            OpenFiles(checkpoint.files, cached=cached, progress=progress) as files,
        ):
            work = _Rebuild(checkpoint, held, files)
            work.run()
    except (OSError, EOFError) as error:
        raise CkptdError(f"not rebuilt: {error}", hint=f"mend that, then again: ckptd rebuild {path}") from error
    return Outcome(
        path=checkpoint.files.location, damaged=work.damaged, rebuilt=work.rebuilt, lost=work.lost,
        notes=work.checkpoint.notes, nbytes=work.nbytes, seconds=time.monotonic() - began_s,
    )  # fmt: skip


class _Rebuild:
    def __init__(self, checkpoint: Checkpoint, held: Held, files: OpenFiles) -> None:
        self.checkpoint, self._held, self._files = checkpoint, held, files
        self._path = checkpoint.files.location
        self._store = open_store(os.path.dirname(self._path), checkpoint.files.integrity)
        self._buffer = block_buffer()
        self.nbytes = 0
        self.rebuilt: list[str] = []
        self.lost: list[Lost] = list(checkpoint.lost)
        self._all_images = checkpoint.images
        self._images: dict[int, Target] = {}  # damaged, by rank
        self._parities: dict[str, dict[int, Target]] = {}  # damaged, by set and member

    @property
    def damaged(self) -> list[str]:
        """Paths of all files that are not as they should be, or of which a block is not."""
        targets = [*self._images.values(), *(t for found in self._parities.values() for t in found.values())]
        return [t.content.path(extent) for t in targets for extent in t.concerned] + [
            lost.path for lost in self.checkpoint.lost
        ]

    def run(self) -> None:
        """Everything. Raises DamagedError when there is damage and no parity at all."""
        for rank, image in self._all_images.items():
            self._look(self._images, rank, image, file_name(rank))
        for one in self.checkpoint.sets:
            found = self._parities.setdefault(one.name, {})
            for member in one.files:
                self._look_at_parity(found, one, member)
        self.nbytes = self._files.moved
        left = {rank for rank, target in self._images.items() if target.damage}
        if left and not self.checkpoint.parity:
            names, above = _listed(self.damaged), os.path.dirname(self._path)
            raise DamagedError(
                f"{self._path}: {names}: damaged or missing, and no parity was drained with this checkpoint",
                hint=f"load an older step: ckptd list {above}; for those to come: drain_parity",
            )
        if importlib.util.find_spec("numpy") is None and self.damaged:
            raise UsageError("rebuild needs numpy, which is not installed", hint="pip install 'ckptd[torch]'")
        self._mend([self._images[rank] for rank in sorted(set(self._images) - left)])
        for one in self.checkpoint.sets:
            left -= self._rebuild(one, left)
        self._lose(left)

    # --- damage

    def _look(self, into: dict[int, Target], key: int, of: Bytes, name: str) -> None:
        target = Target(name, of, of.damage(self._files, self._buffer), of.misfits())
        if target.damage or target.misfits:
            into[key] = target

    def _look_at_parity(self, into: dict[int, Target], one: Set, member: int) -> None:
        """Of a file whose record cannot be read no byte counts."""
        file, parity = one.files[member], one.parity(self.checkpoint.files, member)
        name, known = parity.extents[0].name, member in one.records
        damage = parity.damage(self._files, self._buffer) if known else [(0, file.nbytes)]
        try:
            fits = known and self.checkpoint.files.size(name) == file.file_nbytes
        except OSError:
            fits = False
        if damage or not fits:
            into[member] = Target(file.name, parity, damage, [] if fits else [name])

    # --- a set

    def _rebuild(self, one: Set, left: set[int]) -> set[int]:
        """Mends what the set can of these ranks' images, and its own parity. The ranks that are whole now."""
        parities, ranks = self._parities[one.name], left & set(one.ranks)
        if not ranks and not parities:
            return set()
        found_tails, unknown = tails(self.checkpoint, one)
        fixes, gone = solve(code_of(one.parity_chunk), self._columns(one, ranks, unknown), self._bad_parity(one))
        keys: list[Key] = [key for key in self._keys(one, ranks) if key not in gone]
        targets = {key: self._images[key[1]] if key[0] == "image" else parities[key[1]] for key in keys}
        all_parities = {member: one.parity(self.checkpoint.files, member) for member in one.files}
        sources = FileSources(self._all_images, found_tails, all_parities, self._files)
        try:
            self._begin(targets.values())
            for fix in fixes:
                self._solve(one, fix, sources, targets)
            for key, target in sorted(targets.items()):
                self._finish(one, key, target)
        finally:
            for target in targets.values():
                target.close()
        for kind, member in gone:
            if kind == "parity":
                path = self.checkpoint.files.where(one.files[member].place)
                self.lost.append(Lost(path, self._why(one)))
        return {key[1] for key in keys if key[0] == "image"}

    def _begin(self, targets: Iterable[Target]) -> None:
        """Replacements of them all, once it is known that there is room: their sizes are only what the records say."""
        targets = list(targets)
        need = sum(extent.nbytes for target in targets for extent in target.concerned)
        free, _ = self._store.space()
        if need > free:
            room = f"needs {format_size(need)}, the store has {format_size(free)} free"
            raise CkptdError(
                f"{self._path}: not rebuilt: {room}",
                hint=f"free space on the store; if that is not what its files had: ckptd verify {self._path}",
            )
        for target in targets:
            target.begin(self._held, self._files, self._buffer)

    def _keys(self, one: Set, ranks: set[int]) -> list[Key]:
        return [*(("image", rank) for rank in sorted(ranks)), *(("parity", m) for m in self._parities[one.name])]

    def _columns(self, one: Set, wanted: set[int], unknown: list[int]) -> dict[int, list[Bad]]:
        columns: dict[int, list[Bad]] = {}
        for member, column in enumerate(one.parity_chunk.columns):
            bads = columns.setdefault(member, [])
            for seal in column.seals:
                base = start_of(column, seal.rank)
                if seal.rank not in self._all_images:  # its vote cannot be read: nothing says which bytes are sound
                    bads.append(Bad(base, base + seal.content_nbytes, None, 0))
                    continue
                target = self._images.get(seal.rank)
                into: Key | None = ("image", seal.rank) if seal.rank in wanted else None
                bads += [Bad(base + a, base + b, into, a) for a, b in (target.damage if target else [])]
                if seal.rank in unknown:
                    bads.append(Bad(base + seal.objects_offset, base + seal.content_nbytes, None, 0))
        return columns

    def _bad_parity(self, one: Set) -> dict[int, list[Bad]]:
        nbytes, broken = code_of(one.parity_chunk).parity_nbytes, self._parities[one.name]
        bad: dict[int, list[Bad]] = {}
        for member in range(len(one.parity_chunk.columns)):
            if member not in one.files:
                bad[member] = [Bad(0, nbytes, None, 0)]
            elif member in broken:
                bad[member] = [Bad(a, b, ("parity", member), a) for a, b in broken[member].damage]
        return bad

    def _solve(self, one: Set, fix: Fix, sources: FileSources, targets: dict[Key, Target]) -> None:
        outputs = [output for output in fix.outputs if output.into in targets]
        if not outputs:
            return
        job, where = JobKey("/", self.checkpoint.manifest.job), one.map()
        length = max(PAGE, min(_SLICE_NBYTES, _MEMORY_NBYTES // len(outputs) // PAGE * PAGE))
        into = memoryview(bytearray(length * len(outputs)))
        for first in range(fix.first, fix.last, length):
            last = min(first + length, fix.last)
            places = tuple((output.symbol, index * length) for index, output in enumerate(outputs))
            task = Task(fix.group, first, last, fix.steps, places)
            Pull(sources, job, where, task, into, Table(0, sources.integrity), verify=False).run(
                ignore, "rebuild.half-pulled"
            )
            for index, output in enumerate(outputs):
                start = index * length
                data = into[start : start + last - first]
                targets[output.into].write(self._files, output.at + first - fix.first, data)

    def _finish(self, one: Set, key: Key, target: Target) -> None:
        table = target.check(self._files, self._buffer)
        tail = b""
        if key[0] == "parity":
            file = one.files[key[1]]
            tail = encode_record(replace(one.parity_chunk, index=key[1]), table)
            found = self.checkpoint.files.integrity.digest(tail, Purpose.PARITY_RECORD)
            if (len(tail), found) != (file.record_nbytes, file.record_digest):
                raise DamagedError(f"{target.name}: came out damaged: something changed meanwhile")
        self.rebuilt += target.publish(tail)

    # --- images that need no parity, and those that nothing helps

    def _mend(self, targets: list[Target]) -> None:
        """Files of the wrong size whose blocks are all there."""
        for target in targets:
            try:
                self._begin([target])
                target.check(self._files, self._buffer)
                self.rebuilt += target.publish()
            finally:
                target.close()

    def _lose(self, ranks: set[int]) -> None:
        for rank in sorted(ranks):
            sets = [one for one in self.checkpoint.sets if rank in one.ranks]
            what = "; ".join(map(self._why, sets)) or "no parity that covers it can be read"
            self.lost += [
                Lost(self._images[rank].content.path(extent), what, [rank]) for extent in self._images[rank].concerned
            ]

    def _why(self, one: Set) -> str:
        lacking = [e.name for r in one.ranks if r in self._images for e in self._images[r].concerned]
        lacking += [target.name for target in self._parities[one.name].values()]
        unknown = set(one.ranks) - self._all_images.keys()
        lacking += [f"what the vote of {named_ranks(unknown)} says"] if unknown else []
        none = len(one.parity_chunk.columns) - len(one.files)
        more = [f"the parity of {none} members, which no vote names"] if none else []
        members, scheme = len(one.parity_chunk.columns), one.parity_chunk.scheme
        return (
            f"its set of {members} nodes bears the loss of {scheme.losses} ({scheme.value}) and lacks "
            f"{_listed(lacking + more)}"
        )


def _listed(names: list[str]) -> str:
    shown = ", ".join(os.path.basename(n) if os.path.isabs(n) else n for n in names[:_SHOWN])
    return shown + (f", .. ({len(names)} in all)" if len(names) > _SHOWN else "")
