"""Safetensors files as HuggingFace lays them out: shards, and an index that says which tensor is in which."""

import json
import re
import struct
from collections.abc import Sequence

from ckptd.checkpoint.export.names import Chosen
from ckptd.checkpoint.export.plan import FilePlan
from ckptd.shared.base.errors import UsageError
from ckptd.shared.format.dtypes import file_view
from ckptd.shared.format.slot import PAGE, align_up

INDEX = "model.safetensors.index.json"
_SHARD_RE = re.compile(r"^model(-[0-9]{5,}-of-[0-9]{5,})?\.safetensors$")
_MAX_HEADER_NBYTES = 100_000_000  # readers refuse more


def plan_files(chosen: list[Chosen], max_shard_nbytes: int) -> list[FilePlan]:
    """Shards in the order of the tensors, none above the maximum unless by a single tensor."""
    shards: list[list[Chosen]] = []
    room = -1
    for one in chosen:
        if one.nbytes > room or not shards:
            shards.append([])
            room = max_shard_nbytes
        shards[-1].append(one)
        room -= one.nbytes
    return [_file(file_name(i, len(shards)), shard) for i, shard in enumerate(shards)]


def file_name(index: int, count: int) -> str:
    """Name of a shard; of a single one, the name that it has without an index."""
    return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def is_output(name: str) -> bool:
    """Whether a file of an earlier export may have this name."""
    return name == INDEX or _SHARD_RE.match(name) is not None


def index_json(plans: Sequence[FilePlan], total_nbytes: int) -> bytes:
    """Content of the index. total_nbytes: of the tensors, without headers."""
    places = {name: plan.name for plan in plans for name in plan.names}
    index = {"metadata": {"total_size": total_nbytes}, "weight_map": places}
    return json.dumps(index, indent=2).encode() + b"\n"


def _file(name: str, shard: list[Chosen]) -> FilePlan:
    """Tensors by falling power of two that divides their bytes, so that all are aligned without holes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    ordered = sorted(shard, key=lambda one: -_alignment(one.nbytes))
    at, starts = 0, []
    for one in ordered:
        if one.name == "__metadata__":
            raise UsageError("a tensor cannot be called __metadata__", hint="rename it with --map")
        dtype, shape = file_view(one.dtype, one.tensor.shape)
        entries[one.name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": (at, at + one.nbytes),
        }
        starts.append(at)
        at += one.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    header_nbytes = align_up(8 + len(text))
    if header_nbytes > _MAX_HEADER_NBYTES:
        raise UsageError(f"{name}: too many tensors for one header", hint="give a smaller --max-shard-size")
    header = struct.pack("<Q", header_nbytes - 8) + text.ljust(header_nbytes - 8)
    targets = tuple((one.tensor, one.dtype, header_nbytes + start) for one, start in zip(ordered, starts, strict=True))
    return FilePlan(name, header_nbytes + at, ((0, header),), targets, tuple(one.name for one in shard))


def _alignment(nbytes: int) -> int:
    """Largest power of two, at most a page, that divides nbytes; 0 for none, so that empty tensors come last."""
    return min(nbytes & -nbytes, PAGE)
