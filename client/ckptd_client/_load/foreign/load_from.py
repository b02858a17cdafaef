"""Fills a state from a checkpoint directory of ckptd, of torch.distributed.checkpoint, or of safetensors files."""

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ckptd.shared.base.errors import IntegrityError, MismatchError, RestoreError, UsageError
from ckptd.shared.base.ids import parse_dirname, parse_partial_dirname
from ckptd.shared.base.wording import shown
from ckptd.shared.files.integrity_key import chosen
from ckptd.shared.files.paths import is_url
from ckptd.shared.files.refused import REFUSALS, why_refused
from ckptd.shared.format.committed import TRASH_PREFIX
from ckptd.shared.format.integrity import XXH3, Integrity
from ckptd.shared.format.layout import Leaf, Leaves, Path, is_path_text
from ckptd.shared.format.manifest import LATEST
from ckptd.shared.format.root_names import has_records
from ckptd.shared.stores.kinds import absolute, open_files, real
from ckptd_client._daemon.link import Link
from ckptd_client._load.fit import fit
from ckptd_client._load.foreign.contents import Foreign
from ckptd_client._load.foreign.dcp import METADATA, open_dcp
from ckptd_client._load.foreign.safetensors import SUFFIX, is_torch_file, open_safetensors
from ckptd_client._load.image_ranges import images_in
from ckptd_client._load.lenient import check_strict
from ckptd_client._load.reader import open_file, read_records
from ckptd_client._load.saved_names import Saves
from ckptd_client._load.shared_read.participants import Ask, Participants, all_ranks, taking_part
from ckptd_client._load.shared_read.read import copy_out_together
from ckptd_client._load.stored_fit import fit_to_stored
from ckptd_client._local.rank import Group
from ckptd_client._state.leaves import encode_leaf
from ckptd_client._state.naming import NOTHING_NAMED, Named
from ckptd_client._state.pickle import NO_PICKLE, PickleKeys
from ckptd_client._state.replica_choice import doubt_of, notes_of
from ckptd_client._state.tensors import is_tensor
from ckptd_client._state.tree import flatten, format_path

log = logging.getLogger("ckptd_client")
_JOBS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Loaded:
    """What `load_from` read.

    Attributes:
        kind: "ckptd", "dcp" or "safetensors".
        path: Absolute path of the checkpoint.
        step: The step of a checkpoint of ckptd's, else None.
        seconds: How long it took on this rank.
        nbytes: Bytes that this rank read.
        notes: What was damaged or missing, and what an object left out.
        state: The very dict that `load_from` was given; not a copy.
    """

    kind: str
    path: str
    step: int | None
    seconds: float
    nbytes: int
    notes: list[str] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)


def checked(path: object, state: object) -> str:
    """The absolute path. Raises UsageError for arguments of other kinds, with a hint."""
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"the path must be text or a Path, not {type(path).__name__}", hint="load_from(path, state)")
    if not isinstance(state, dict):
        hint = "load_from(path, model.state_dict())" if hasattr(state, "state_dict") else "load_from(path, state)"
        raise UsageError(f"the state must be a dict, not {type(state).__name__}", hint=hint)
    text = os.fspath(path)
    if not isinstance(text, str) or not is_path_text(text):
        raise UsageError(f"{shown(text)} can be the path of nothing", hint="load_from(path, state)")
    return absolute(text)


def read_from(  # noqa: PLR0913 - keyword-only
    link: Link, path: str | os.PathLike[str], state: dict[str, Any], *, together: Ask | None, integrity: str | None,
    strict: bool,
) -> Loaded:  # fmt: skip
    """See Client.load_from. together: as Link.ask, if all ranks of the job read it together."""
    began = time.perf_counter()
    with taking_part(all_ranks(link, together) if together is not None else None) as participants:
        check_strict(strict)
        proof = link.settings.integrity if integrity is None else chosen(integrity, None)
        where = checked(path, state)
        kind, step, nbytes, notes = load_from(
            where, state, link.group, link.settings.pickle_keys, participants, integrity=proof,
            named=link.settings.named, strict=strict,
        )  # fmt: skip
    for note in notes:
        log.warning("ckptd: %s: %s", where, note)
    return Loaded(kind, where, step, time.perf_counter() - began, nbytes, notes, state)


def load_from(  # noqa: PLR0913 - what is wanted, and what is allowed
    path: str, state: dict[str, Any], group: Group, keys: PickleKeys = NO_PICKLE,
    participants: Participants | None = None, *,
    integrity: Integrity = XXH3, named: Named = NOTHING_NAMED, strict: bool = True,
) -> tuple[str, int | None, int, list[str]]:  # fmt: skip
    """Fills the state, together with the participants, whom the caller has entered.

    Returns kind, step, bytes read, and notes. Raises as Client.load_from does.
    """
    try:
        kind = kind_of(path)
        if kind == "ckptd":
            return _load_own(path, state, group, keys, participants, integrity, named, strict=strict)
        if integrity.keyed:  # removing COMMITTED and the manifest would make it look like another program's checkpoint
            text = f"{path} is a checkpoint of another program ({kind}), which proves nothing"
            raise IntegrityError(text, hint="if you trust who could write it: load_from(path, state, integrity='xxh3')")
        found = open_dcp(path) if kind == "dcp" else open_safetensors(path)
        return (kind, None, *_load_foreign(path, state, found, strict=strict))
    except OSError as error:
        text = f"{error.filename or path}: {error.strerror or error}"
        if error.errno in REFUSALS:
            refused = why_refused(error.filename or path)
            raise RestoreError(f"{text}: {refused.text}", hint=refused.hint) from error
        raise RestoreError(text, hint=f"see what is there: ls -la {path}") from error


def kind_of(path: str, call: str = "client.load_from({!r}, state)") -> str:
    """Detects the format of a checkpoint. Raises UsageError with a hint if there is none. call: the call in hints.

    An unknown directory counts as safetensors, whose reader raises an error for it.
    """
    if is_url(path):
        return "ckptd"  # no other program's checkpoints are read from there
    if not os.path.exists(path):
        raise UsageError(f"{path} does not exist", hint="give the directory of a checkpoint, or a .safetensors file")
    if not os.path.isdir(path):
        _check_alone(path, call)
    names = set(os.listdir(path)) if os.path.isdir(path) else set()
    last = os.path.basename(os.path.realpath(path))
    ours = parse_dirname(last) or parse_partial_dirname(last) or last.startswith(TRASH_PREFIX)
    if ours or has_records(names):
        return "ckptd"  # or should be: open_committed raises what is wrong
    if METADATA in names:
        return "dcp"
    if LATEST in names or any(parse_dirname(name) for name in names):
        text = f"{path} is the directory of a job, not of one checkpoint"
        raise UsageError(text, hint=call.format(os.path.join(path, LATEST)))
    jobs = [name for name in sorted(names) if os.path.lexists(os.path.join(path, name, LATEST))]
    if jobs and not any(name.endswith(SUFFIX) for name in names):
        shown = ", ".join(jobs[:_JOBS_SHOWN]) + (", ..." if len(jobs) > _JOBS_SHOWN else "")
        raise UsageError(
            f"{path} is a store, with the jobs {shown}", hint=call.format(os.path.join(path, jobs[0], LATEST))
        )
    return "safetensors"


def _names(directory: str) -> list[str]:
    """In the directory; none where they may not be read."""
    try:
        return os.listdir(directory)
    except PermissionError:
        return []


def _check_alone(path: str, call: str) -> None:
    """Refuses one file of a checkpoint: without digests, a rank's part of a tensor would count as complete."""
    for directory in (os.path.dirname(path), os.path.dirname(os.path.realpath(path))):
        if has_records(_names(directory)):
            raise UsageError(f"{path} is one file of a checkpoint", hint=call.format(directory))
    if is_torch_file(path):
        raise UsageError(f"{path} is a torch.save file", hint=f"torch.load({path!r}, weights_only=True)")


def _load_own(  # noqa: PLR0913, PLR0917
    path: str,
    state: dict[str, Any],
    group: Group,
    keys: PickleKeys,
    participants: Participants | None,
    integrity: Integrity,
    named: Named,
    *,
    strict: bool,
) -> tuple[str, int | None, int, list[str]]:
    stored = open_files(real(path), integrity)  # latest may move on meanwhile
    records = read_records(stored)
    manifest = records.manifest
    if participants is not None:
        participants.save = manifest.save
    fitted = fit_to_stored(
        records, state, group, named, where=stored.location, keys=keys, strict=strict,
        placed=lambda saves: _placed(saves, state, strict=strict),
    )  # fmt: skip
    copy_out_together(partial(open_file, records), fitted.targets, records, participants, integrity)
    fitted.settle()
    fitted.compare(images_in(records))
    notes = fitted.finish(state, strict=False)
    doubted = [f"step {manifest.save.step}: {text}" for text in doubt_of(manifest.replicas)]
    doubted += notes_of(fitted.taken, manifest.replicas)
    return "ckptd", manifest.save.step, fitted.nbytes, [*doubted, *notes, *fitted.own_notes]


def _load_foreign(path: str, state: dict[str, Any], found: Foreign, *, strict: bool) -> tuple[int, list[str]]:
    empty = encode_leaf(None, path)  # placeholder until it is known which values are wanted
    leaves = Leaves(1, {name: Leaf(empty.codec, empty.data) for name in found.values})
    saves = Saves(found.boxes, found.paths, set(), leaves, rank=-1, whole=True)
    _check_readable(state, found)
    fitted = fit(state, _placed(saves, state, strict=strict), where=path, strict=strict)
    fitted.leaves |= {name: found.values[name]() for name in fitted.leaves if name in found.values}
    for number, targets in sorted(fitted.targets.items()):
        found.sources[number](targets)
    fitted.settle()
    notes = fitted.finish(state, strict=False)
    return fitted.nbytes, notes


def _check_readable(state: Any, found: Foreign) -> None:
    flat = flatten(state, is_tensor)
    for name, path in zip(flat.names, flat.paths, strict=True):
        if name in found.unreadable:
            text = f"{format_path(path)} is in the checkpoint {found.unreadable[name]}"
            raise MismatchError(text, hint="leave it out of the state")


def _placed(saves: Saves, state: Any, *, strict: bool) -> Saves:
    """The saves with the state's paths for the names. If strict, names without a path in the state are not expected.

    Another program may nest in another way; names joined with dots are the same. Inside a Stateful the checkpoint still
    defines the names.
    """
    flat = flatten(state, is_tensor)
    here = dict(zip(flat.names, flat.paths, strict=True))
    owners = {".".join(str(key) for _, key in prefix): (prefix, stateful) for prefix, stateful in flat.statefuls}
    paths: dict[str, Path] = {}
    inside: set[str] = set()
    for name, path in saves.paths.items():
        owner = _owner(name, owners)
        if owner:
            inside.add(name)
        paths[name] = here.get(name) or (_inside(name, path, owner, owners[owner]) if owner else path)
    return replace(saves, paths=paths, expected=inside if strict else set(paths))


def _owner(name: str, owners: Mapping[str, tuple[Path, Any]]) -> str:
    """Name of the innermost Stateful around the name; empty if there is none."""
    return max((owner for owner in owners if name.startswith(f"{owner}.")), key=len, default="")


def _inside(name: str, path: Path, owner: str, stateful: tuple[Path, Any]) -> Path:
    """The path in a Stateful's own nesting."""
    prefix, _ = stateful
    rest: Path = (("k", name[len(owner) + 1 :]),)
    if ".".join(str(key) for _, key in path[: len(prefix)]) == owner and len(path) > len(prefix):
        rest = path[len(prefix) :]
    return prefix + rest
