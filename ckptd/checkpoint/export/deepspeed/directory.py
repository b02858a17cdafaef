"""Which files make a checkpoint of DeepSpeed's, by their names, and whether all are there."""

import os
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ckptd.shared.base.errors import CkptdError, DamagedError, UsageError
from ckptd.shared.files.regular import contents

_OPTIMIZER_RE = re.compile(r"^((?:bf16_|fp16_)?zero_pp_rank_)(\d+)_mp_rank_(\d+)_optim_states\.pt$", re.ASCII)
_MODEL_RE = re.compile(r"^(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt$", re.ASCII)
_LAYER_RE = re.compile(r"^layer_(\d+)(?:-model_00)?-model_states\.pt$", re.ASCII)
_LATEST = "latest"
_MAX_TAG_NBYTES = 4096
_TAGS_SHOWN = 5


class Files(NamedTuple):
    """Paths of one stage of a pipeline, or of all, by rank. model: one of ZeRO-1 and 2, of ZeRO-3 as many as ranks."""

    path: str  # the directory
    stage: str  # as in the names, "00"
    optimizer: list[str]
    model: list[str]


def find(path: str) -> str | None:
    """The directory with the files: path itself, or the one in it that `latest` names. None for one of another kind.

    Raises UsageError for a directory of several checkpoints that says of none that it is the latest.
    """
    path = os.path.realpath(path)
    if not os.path.isdir(path):
        return None
    names = sorted(os.listdir(path))
    if _has_files(names):
        return path
    tags = [name for name in names if os.path.isdir(os.path.join(path, name)) and _holds_files(path, name)]
    if not tags:
        return None
    latest = os.path.join(path, _LATEST)
    hint = f"ckptd export {os.path.join(path, tags[-1])} OUT"
    shown = ", ".join(tags[:_TAGS_SHOWN]) + (", .." if len(tags) > _TAGS_SHOWN else "")
    if _LATEST not in names:
        raise UsageError(f"{path} has the checkpoints {shown} and no `latest`", hint=f"name one: {hint}")
    tag = contents(latest, _MAX_TAG_NBYTES, follow=True).decode(errors="replace").strip()
    if tag not in tags:
        raise UsageError(f"{latest} names {tag!r}, which is no checkpoint there; there is {shown}", hint=hint)
    return os.path.join(path, tag)


def _holds_files(path: str, name: str) -> bool:
    try:
        return _has_files(os.listdir(os.path.join(path, name)))
    except OSError:
        return False


def _has_files(names: Iterable[str]) -> bool:
    return any(_OPTIMIZER_RE.match(name) or _MODEL_RE.match(name) for name in names)


def files_of(path: str) -> list[Files]:
    """The files in the directory, for each stage of a pipeline: without one, for all. Raises UsageError for others."""
    names = sorted(os.listdir(path))
    _check_kind(path, names)
    optimizer = [match for name in names if (match := _OPTIMIZER_RE.match(name))]
    model = [match for name in names if (match := _MODEL_RE.match(name))]
    if len({match[1] for match in optimizer}) > 1:
        kinds = ", ".join(sorted({f"{match[1]}*" for match in optimizer}))
        raise DamagedError(f"{path} has files of several saves: {kinds}", hint="remove those of the older one")
    return [
        Files(
            path,
            stage,
            [os.path.join(path, m[0]) for m in sorted(optimizer, key=lambda m: int(m[2])) if m[3] == stage],
            [os.path.join(path, m[0]) for m in sorted(model, key=lambda m: int(m[1] or 0)) if m[2] == stage],
        )
        for stage in sorted({match[3] for match in optimizer})
    ]


def layers_of(path: str) -> list[tuple[int, str]]:
    """Numbers and paths of the files of a pipeline's layers."""
    matches = (_LAYER_RE.match(name) for name in os.listdir(path))
    return sorted((int(match[1]), os.path.join(path, match[0])) for match in matches if match)


def _check_kind(path: str, names: Sequence[str]) -> None:
    """Raises UsageError for a directory whose files say that their tensors are cut in more ways than ZeRO's."""
    experts = [name for name in names if "expert" in name or name.startswith("expp_rank_")]
    layers = [name for name in names if name.startswith("layer_") and name not in experts]
    stages = [name for name in names if not layers and _MODEL_RE.match(name) and "mp_rank_00_" not in name]
    for found, what in (
        (experts, "of experts (MoE), which every rank saves for itself"),
        ([name for name in layers if not _LAYER_RE.match(name)] + stages, "of tensor parallelism"),
    ):
        if found:
            raise UsageError(
                f"{path} is a checkpoint {what} ({min(found)}): that is not exported",
                hint="DeepSpeed's ds_to_universal.py converts it",
            )
    if not any(_OPTIMIZER_RE.match(name) for name in names):
        if "zero" in names:
            raise UsageError(
                f"{path} is a universal checkpoint, converted from one of ZeRO's", hint="export the one it was made of"
            )
        if not any(name.startswith("mp_rank_") for name in names):
            raise DamagedError(
                f"{path} has no file of the optimizer's (*_optim_states.pt), where the weights of ZeRO-3 lie",
                hint="copy them from the nodes that wrote them, or take another tag",
            )
        raise UsageError(
            f"{path} has no file of ZeRO's (*_optim_states.pt): its weights are whole",
            hint=f"with torch: torch.load({os.path.join(path, 'mp_rank_00_model_states.pt')!r})['module']",
        )


def check_ranks(files: Files, ranks: int) -> None:
    """Raises DamagedError, naming the first one, when a rank's file is missing, or when there are more than ranks."""
    names = [os.path.basename(name) for name in files.optimizer]
    there = {int(match[2]) for name in names if (match := _OPTIMIZER_RE.match(name))}
    if len(there) > ranks:
        raise DamagedError(
            f"{files.path}: {ranks} ranks saved, and there are files of {len(there)}",
            hint=f"remove what an older save left: {names[-1]} and others",
        )
    if len(there) == len(names) == ranks and max(there) == ranks - 1:
        return
    lost = next(rank for rank in range(ranks) if rank not in there)
    raise _missing(files, re.sub(r"rank_\d+", f"rank_{lost}", names[0], count=1), ranks)


def model_files(files: Files, count: int) -> list[str]:
    """Paths of the first files of the model, by rank. Raises DamagedError, naming the first that is missing."""
    names = [os.path.basename(path) for path in files.model]
    numbers = [int(match[1] or 0) for name in names if (match := _MODEL_RE.match(name))]
    for rank in range(count):
        if numbers[rank : rank + 1] != [rank]:
            name = f"mp_rank_{files.stage}_model_states.pt"
            raise _missing(files, name if count == 1 else f"zero_pp_rank_{rank}_{name}", len(files.optimizer))
    return files.model[:count]


def _missing(files: Files, name: str, ranks: int) -> CkptdError:
    return DamagedError(
        f"{os.path.join(files.path, name)}: missing, of {ranks} ranks that saved",
        hint="copy it from the node that wrote it (use_node_local_storage leaves each its own), or take another tag",
    )
