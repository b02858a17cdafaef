"""A directory of the trainer's own for the checkpoint of a state: the daemon publishes it when the save is durable.

Until then its draft lies beside its place, under a hidden name: what the trainer adds to the checkpoint, and a marker,
which says of which save that is. Or the place itself is the draft, where a trainer has made it before. What a trainer
did not live to see its daemon publishes; what the daemon lost too the next run of the job asks for again.
"""

import contextlib
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple, TypeVar

import msgspec

from ckptd.shared.base.errors import CkptdError
from ckptd.shared.base.ids import Run, SaveId
from ckptd.shared.format.manifest import STOCK_METADATA
from ckptd.shared.format.origin import MARKER, Origin
from ckptd.shared.protocol.messages import AskPublish
from ckptd.shared.protocol.publication import Draft, Publication, check_publication
from ckptd_client.client import Client, staging_of

log = logging.getLogger("ckptd_client")
T = TypeVar("T")
_ABANDONED_S = 600.0  # after which a draft without a marker is nobody's
_HIDDEN_RE = re.compile(r"\.(.+)\.ckptd-[0-9a-z-]+")


def draft_of(place: str, save: SaveId) -> Draft:
    """The draft of a place, the same on all ranks."""
    folder, name = os.path.split(place)
    return Draft(place, os.path.join(folder, f".{name}.ckptd-{save.text}"))


def draft_in_place(directory: str) -> Draft:
    """A place that is its own draft."""
    return Draft(os.path.abspath(directory), os.path.abspath(directory))


def publication_of(client: Client, draft: Draft) -> Publication:
    """What each rank says to its daemon. Raises UsageError for a place that is none."""
    to = Publication.of_state(draft)
    check_publication(to, staging_of(client).job)
    return to


def prepare(draft: Draft, origin: Origin, files: Mapping[str, bytes]) -> None:
    """Makes the draft, of small files. Before the save is staged on all ranks; by one of them. Raises OSError."""
    os.makedirs(draft.path, exist_ok=True)
    for name, content in files.items():
        _put(draft.path, name, content)
    _put(draft.path, MARKER, msgspec.json.encode(origin))
    _sync(draft.path)
    _sync(os.path.dirname(draft.path))


def prepare_in_place(directory: str, origin: Origin, *, synced: Iterable[str]) -> None:
    """The directory is its own draft: no other checkpoint from here on. synced: files there, if they are. OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(directory, STOCK_METADATA))
    for name in synced:
        with contextlib.suppress(FileNotFoundError):
            _sync(os.path.join(directory, name))
    prepare(draft_in_place(directory), origin, {})


def publish(client: Client, save: SaveId, draft: Draft, *, wait: bool = True) -> None:
    """Has the daemon publish the draft: if the save is durable it is there then, else it will be.

    wait: False returns as soon as the daemon has it on record, whatever its store does. Blocks for the daemon's answer,
    save_timeout_s at most. Raises CkptdError; with wait, where it cannot be published too.
    """
    staging = staging_of(client)
    staging.ask(lambda seq: AskPublish(seq=seq, save=save, draft=draft, wait=wait), staging.save_timeout_s)


def is_filled(client: Client, directory: str, origin: Origin) -> bool:
    """Whether a directory that was prepared in its place has the files of the save. Blocks, raises as publish."""
    publish(client, origin.save, draft_in_place(directory))
    return origin_of(directory) == origin and os.path.exists(os.path.join(directory, STOCK_METADATA))


def is_published(draft: Draft) -> bool:
    """Whether the daemon has made the place of a draft of a durable save: the draft is gone, or has the files."""
    if draft.path == draft.place:
        return os.path.exists(os.path.join(draft.place, STOCK_METADATA))
    return not os.path.lexists(draft.path)


def origin_of(directory: str | os.PathLike[str]) -> Origin | None:
    """Which save the directory is of, or its draft, None when none, or the marker cannot be read, or names no save.

    None also when something else was saved over it: what is listed there is not what the checkpoint lists.
    """
    try:
        with open(os.path.join(directory, MARKER), "rb") as file:
            origin = msgspec.json.decode(file.read(), type=Origin)
    except (OSError, msgspec.MsgspecError):
        return None
    if not origin.is_sound or _is_listed_otherwise(directory, origin):
        return None
    return msgspec.structs.replace(origin, files=[])


def _is_listed_otherwise(directory: str | os.PathLike[str], origin: Origin) -> bool:
    try:
        there = os.stat(os.path.join(directory, STOCK_METADATA))
        return not os.path.samestat(there, os.stat(os.path.join(origin.path, STOCK_METADATA)))
    except OSError:
        return False  # nothing is listed yet; or the checkpoint itself is gone, and cannot be taken for what is there


class Found(NamedTuple):
    """A draft in a folder. origin: of its save; None where its writer was killed while it wrote it."""

    origin: Origin | None
    draft: Draft


def drafts_in(folder: str) -> list[Found]:
    """The folder's drafts, the oldest save first."""
    found: list[Found] = []
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        match = _HIDDEN_RE.fullmatch(name)
        if match is not None:
            path = os.path.join(folder, name)
            found.append(Found(origin_of(path), Draft(os.path.join(folder, match[1]), path)))
    whole = ((each.origin.save, each.draft.path, each) for each in found if each.origin is not None)
    return [*(each for each in found if each.origin is None), *oldest_first(whole)]


def finish(client: Client, folder: str, own: Collection[SaveId] = ()) -> None:
    """What an earlier run has left in the folder: published where it is durable, dropped where it is lost.

    own: saves of this run, whose drafts are left alone. What cannot be known is left too, with a warning in the log.
    Raises OSError for a folder that cannot be read.
    """
    staging = staging_of(client)
    for origin, draft in drafts_in(folder):
        if origin is None:
            if time.time() - _written(draft.path) > _ABANDONED_S:  # else another training may be preparing it
                discard(draft.path)
        elif not origin.is_of(staging.job):  # no file of a store that no rank here has named gets a name here
            log.warning("ckptd: %s does not appear: it is of job %r in %s", draft.place, origin.job, origin.store)
        elif origin.save not in own:
            try:
                publish(client, origin.save, draft)
                lost = os.path.isdir(draft.path) and not staging.has(origin.save)
            except CkptdError as error:
                log.warning("ckptd: %s does not appear: %s", draft.place, error)
                continue
            if lost:
                log.warning("ckptd: %s does not appear: its checkpoint was lost, or gave way to another", draft.place)
                discard(draft.path)


def remove(place: str) -> None:
    """Removes the place and its drafts. ckptd's own checkpoint stays. Raises OSError."""
    for found in drafts_in(os.path.dirname(place)):
        if found.draft.place == place:
            discard(found.draft.path)
    if os.path.islink(place) or os.path.isfile(place):
        os.unlink(place)
    elif os.path.isdir(place):
        discard(place)


def discard(directory: str) -> None:
    """Removes the directory, under another name first: an incomplete one is neither a checkpoint nor a draft."""
    folder, name = os.path.split(directory)
    aside = os.path.join(folder, f".{name.lstrip('.')}.ckptd-old-{uuid.uuid4().hex}")
    with contextlib.suppress(FileNotFoundError):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(directory, MARKER))
        os.rename(directory, aside)
        shutil.rmtree(aside, ignore_errors=True)


def oldest_first(found: Iterable[tuple[SaveId, str, T]]) -> list[T]:
    """The third of each; the first is its save, the second its directory.

    Of two runs of one incarnation number nothing in their names says which was first: the one that wrote a directory
    last is the newer.
    """
    listed = list(found)
    written: dict[Run, float] = {}
    for save, directory, _ in listed:
        written[save.owner] = max(written.get(save.owner, 0.0), _written(directory))
    by_age = sorted(listed, key=lambda one: (one[0].incarnation, written[one[0].owner], one[0].listed))
    return [each for _, _, each in by_age]


def _written(directory: str) -> float:
    try:
        return os.stat(directory).st_mtime
    except FileNotFoundError:  # it has appeared meanwhile
        return time.time()


def _put(directory: str, name: str, content: bytes) -> None:
    temp = os.path.join(directory, f".{name}.tmp-{uuid.uuid4().hex}")
    with open(temp, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temp, os.path.join(directory, name))


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
