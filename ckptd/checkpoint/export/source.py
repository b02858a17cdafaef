"""A checkpoint as the export needs it; and a committed one of ckptd's, found and opened.

Its records are checked against each other, its layouts decoded.
"""

import itertools
import os
from collections.abc import Container
from typing import ClassVar

import msgspec

from ckptd.checkpoint.export.plan import Tensor, whole_tensors
from ckptd.checkpoint.export.read import SourceFile
from ckptd.checkpoint.whereabouts import where_checkpoints_are
from ckptd.shared.base.errors import UsageError, parted
from ckptd.shared.base.ids import SaveId, parse_dirname, parse_partial_dirname
from ckptd.shared.format.committed import TRASH_PREFIX, file_findings, open_records, raise_first
from ckptd.shared.format.integrity import XXH3, Integrity
from ckptd.shared.format.layout import Layout, Path, decode_leaves
from ckptd.shared.format.manifest import (
    LATEST,
    STOCK_FILES,
    STOCK_METADATA,
    FileRecord,
)
from ckptd.shared.format.replica_attestations import doubt
from ckptd.shared.format.root_names import has_records
from ckptd.shared.format.stored_files import StoredFiles
from ckptd.shared.format.stored_records import StoredRecords
from ckptd.shared.stores.kinds import open_files, real
from ckptd.store.opening import open_store

_JOBS_SHOWN = 5


class Checkpoint(msgspec.Struct, frozen=True):
    """What a committed checkpoint consists of. files and layouts by rank."""

    stored: StoredFiles
    save: SaveId
    files: list[SourceFile]
    layouts: list[Layout]
    leaves: int  # values that are no tensors
    records: StoredRecords
    doubted: str = ""  # the note about its replicas for the user
    flat: ClassVar[bool] = False

    @property
    def path(self) -> str:
        """Its location."""
        return self.stored.location

    @property
    def step(self) -> int:
        """As saved."""
        return self.save.step

    @property
    def incarnation(self) -> int | None:
        """As saved."""
        return self.save.incarnation

    @property
    def save_id(self) -> str:
        """As text."""
        return self.save.text

    @property
    def paths(self) -> dict[str, Path]:
        """Of the first rank that has a name."""
        return {name: path for layout in reversed(self.layouts) for name, path in layout.paths.items()}

    @property
    def names(self) -> list[str]:
        """Of the tensors, tied ones too, in the order of the state that was saved."""
        there = {entry.name for layout in self.layouts for entry in layout.tensors}
        there.update(name for layout in self.layouts for name in layout.aliases)
        ordered = itertools.chain((name for layout in self.layouts for name in layout.paths), sorted(there))
        return [name for name in dict.fromkeys(ordered) if name in there]

    def tensors(self, names: Container[str]) -> dict[str, Tensor]:
        """Those of these names. Raises DamagedError for one that ranks disagree about, or that has gaps."""
        return whole_tensors(self.layouts, names)

    def stock_leaves(self) -> dict[str, bytes]:
        """Rank 0's values that are no tensors, a torch.save archive each; none if it made none.

        Opaque bytes, checked like all else. Raises DamagedError or OSError, naming the file.
        """
        objects = self.records.vote_for(0).stock_objects
        if objects is None:
            return {}
        return {name: objects.data[at : at + nbytes] for name, (at, nbytes) in objects.index.items()}


def find(path: str, integrity: Integrity = XXH3) -> tuple[str, list[str]]:
    """The checkpoint's directory: path itself, or the newest in the job's directory that path is. Raises UsageError.

    And what is wrong with other checkpoints of the job: one of them may be newer.
    """
    path = real(path)
    base = os.path.basename(path)
    if parse_partial_dirname(base) is not None or base.startswith(TRASH_PREFIX):
        return path, []  # open_committed says what it is
    names: list[str] | None = None
    try:
        names = open_files(path, integrity).names()
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist", hint=where_checkpoints_are(path)) from None
    except NotADirectoryError:
        pass
    if has_records(names or ()) or parse_dirname(base) is not None:
        return path, []
    store, job = os.path.split(path)
    found = open_store(store, integrity).scan(job)
    if not found.committed:
        _check_other(path, names)
        why = (
            parted(found.problems[0])[0]
            if found.problems
            else "neither a checkpoint nor the directory of a job that has one"
        )
        raise UsageError(f"nothing to export in {path}: {why}", hint=f"ckptd list {path}")
    return os.path.join(path, found.committed[0].dirname), found.problems


def _check_other(path: str, names: list[str] | None) -> None:
    """Raises UsageError for a directory of another kind, with what to do with it. names: in it, None of a file."""
    if names is None:
        raise UsageError(f"{path} is a file", hint=f"give its directory: {os.path.dirname(path)}")
    if STOCK_METADATA in names:
        hint = "client.load_from(path, state) reads it, and so does dcp.load(state, checkpoint_id=path)"
        raise UsageError(f"{path} is a directory of DCP's, not ckptd's", hint=hint)
    jobs = [name for name in names if os.path.lexists(os.path.join(path, name, LATEST))]
    if jobs:
        shown = ", ".join(jobs[:_JOBS_SHOWN]) + (", ..." if len(jobs) > _JOBS_SHOWN else "")
        hint = f"ckptd export {os.path.join(path, jobs[0])} OUT"
        raise UsageError(f"{path} is a store, with the jobs {shown}", hint=hint)


def load(path: str, integrity: Integrity = XXH3) -> Checkpoint:
    """The checkpoint in the directory path. Raises UsageError, DamagedError or OSError, naming the file."""
    stored = open_files(path, integrity)
    records = open_records(stored)
    raise_first(file_findings(stored, records))
    files = [_source(stored, record) for record in records]
    layouts = [records.layout(rank) for rank in range(len(records))]
    for layout in layouts:
        _check_tensors(path, layout)
    leaves = sum(len(decode_leaves(r.leaves, where=stored.where(r.name)).leaves) for r in records)
    manifest = records.manifest
    return Checkpoint(stored, manifest.save, files, layouts, leaves, records, doubt(manifest.replicas))


def _check_tensors(path: str, layout: Layout) -> None:
    """Raises UsageError for a trainer's files: they are for the trainer, and its tools."""
    if layout.raw:
        hint = f"their names stand in {os.path.join(path, STOCK_FILES)}"
        raise UsageError(f"{path} has a trainer's own files, no tensors of ckptd's", hint=hint)


def _source(stored: StoredFiles, record: FileRecord) -> SourceFile:
    """The image."""
    return SourceFile(stored.where(record.name), record.nbytes, record.digests, record.extents(), stored=stored)
