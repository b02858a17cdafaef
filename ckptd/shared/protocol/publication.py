"""Where a trainer wants its files once they are committed: an order of this user's, from a rank to its own daemon.

It travels from the rank to the daemon of its node, which keeps it in its arena, and from there to the daemon's store
worker. It is in no file of a store, and in no message between daemons: nothing read from there may say where to write.
"""

import itertools
import posixpath
from collections.abc import Mapping
from typing import Annotated, Self

import msgspec

from ckptd.shared.base.errors import UsageError
from ckptd.shared.base.ids import MAX_PARTS, MAX_STORE_CHARS, JobKey, SaveId, StorePath
from ckptd.shared.format.layout import SavedFor, TrainerFile, is_path_text, is_text, is_trainer_file
from ckptd.shared.format.origin import MARKER

MAX_INTENTS = 64  # of a job that an arena keeps
MAX_DRAFTS = 64  # of a save


class Draft(msgspec.Struct, frozen=True, array_like=True):
    """A place for the checkpoint of a state, and the directory that a rank has prepared for it.

    The draft has a marker, which names the save, and files of the trainer's own. It lies beside the place, which then
    appears at once with all of these files, and the draft is gone; or it is the place itself, which gets the
    checkpoint's files.
    """

    place: StorePath
    path: StorePath


class Publication(msgspec.Struct, frozen=True, omit_defaults=True):
    """A directory, and what may be put there. All that is written lies below it, but for the pointer."""

    directory: StorePath
    whole: bool  # the directory is this checkpoint's alone: it appears, or is replaced, at once
    pointer: Annotated[str, msgspec.Meta(max_length=MAX_STORE_CHARS)] = ""  # a small file, written last; or none
    text: Annotated[str, msgspec.Meta(max_length=4096)] = ""  # its content
    # Files of ranks of this node: only these may lie beside somebody's files. Of other ranks only the store knows.
    names: Annotated[tuple[TrainerFile, ...], msgspec.Meta(max_length=4096 * MAX_PARTS)] = ()
    # Of a state, whose files have their own names: where they are to lie. The fields above mean nothing then.
    drafts: Annotated[tuple[Draft, ...], msgspec.Meta(max_length=MAX_DRAFTS)] = ()

    @property
    def said(self) -> SavedFor:
        """What a checkpoint records of it for its readers."""
        return SavedFor(self.directory, self.whole, self.pointer)

    @classmethod
    def of_state(cls, draft: Draft) -> Self:
        """Of a state, at one place."""
        return cls(draft.place, whole=True, drafts=(draft,))


class Intent(msgspec.Struct, frozen=True):
    """What is, or was, to be published of a save."""

    save: SaveId
    to: Publication


Intents = Mapping[SaveId, Publication]


def check_publication(to: Publication, job: JobKey) -> None:
    """Raises UsageError for a place that is none, or that is the job's own on the store."""
    for path in filter(None, (to.directory, to.pointer, *itertools.chain(*map(msgspec.structs.astuple, to.drafts)))):
        if len(path) > MAX_STORE_CHARS or not is_path_text(path):
            hint = f"at most {MAX_STORE_CHARS} characters"
            raise UsageError(f"{path!r} is no path that a daemon takes", hint=hint)
        if not path.startswith("/") or posixpath.normpath(path) != path or path == "/" or path.startswith("//"):
            raise UsageError(f"{path!r} is no place for files", hint="an absolute path without `..`, `.` and `//`")
        own = posixpath.join(job.store, job.job)
        if posixpath.commonpath([own, path]) == own:
            problem = f"{path} lies where ckptd has what is its own of job {job.job!r}, a `latest` among it"
            raise UsageError(problem, hint="a directory beside the store, or another store")
    misplaced = next(
        (draft for draft in to.drafts if posixpath.split(draft.place)[0] != posixpath.split(draft.path)[0]), None
    )
    if misplaced is not None:
        text = f"the draft {misplaced.path} does not lie beside {misplaced.place}"
        raise UsageError(text, hint="a name in that directory")
    if not is_text(to.text):
        raise UsageError(f"the text of the pointer {to.pointer} is not valid Unicode", hint="change the text")
    wrong = next((name for name in to.names if not is_trainer_file(name) or name == MARKER), None)
    if wrong is not None:
        raise UsageError(f"{wrong!r} is no path of a file below a directory", hint="such as 'rank0/optimizer.pt'")


def joined(one: Publication, other: Publication) -> Publication:
    """Of two ranks of a node: the first one's place, with the files of both, if they say the same one.

    Of a state: the places of both.
    """
    if one.drafts or other.drafts:
        drafts = tuple(dict.fromkeys((*one.drafts, *other.drafts)))[:MAX_DRAFTS]
        return msgspec.structs.replace(one, drafts=drafts)
    if one.said != other.said:
        return one
    return msgspec.structs.replace(one, names=tuple(sorted({*one.names, *other.names})))
