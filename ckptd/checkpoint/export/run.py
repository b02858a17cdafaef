"""The export as a whole: open, choose, plan, write, publish; or leave nothing behind."""

import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from ckptd.checkpoint.export import casts, dcp_out, safetensors_out, torch_out
from ckptd.checkpoint.export.average import Averaged, Source, load_last
from ckptd.checkpoint.export.deepspeed.directory import find as find_deepspeed
from ckptd.checkpoint.export.deepspeed.source import ZeroCheckpoint
from ckptd.checkpoint.export.names import Choice, Chosen, choose, new_name, not_averaged, wanted
from ckptd.checkpoint.export.plan import FilePlan, Tensor
from ckptd.checkpoint.export.read import VerifiedReader
from ckptd.checkpoint.export.source import find, load
from ckptd.checkpoint.export.write import OutputFile, write_files
from ckptd.shared.base.errors import CkptdError, IntegrityError, UsageError
from ckptd.shared.files.paths import resolved
from ckptd.shared.format.dtypes import itemsize
from ckptd.shared.format.integrity import XXH3, Integrity
from ckptd.shared.format.root_names import has_records
from ckptd.system import human
from ckptd.system.files import FileLayer, is_temp

SCHEMA = 1
_BLOCKS = 9  # of 16 MiB: eight files cut across, and one more; in all below 256 MiB
_MOST_BLOCKS = 32  # for the mean of many checkpoints: 512 MiB

Format = Literal["safetensors", "torch", "dcp"]
_DIRECTORIES = ("safetensors", "dcp")
# What readers open first, and whether a name is one of an earlier export's files.
_EARLIER: dict[Format, tuple[str, Callable[[str], bool]]] = {
    "safetensors": (safetensors_out.INDEX, safetensors_out.is_output),
    "torch": ("", lambda _name: False),
    "dcp": (dcp_out.METADATA, dcp_out.is_output),
}


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to export, whereto, and how."""

    source: str
    out: str  # a directory, for torch a file
    format: Format = "safetensors"
    max_shard_nbytes: int = 5 << 30
    choice: Choice = Choice()
    average: int = 1  # checkpoints, the newest and those before it, whose mean is written
    nested: bool = False  # torch: containers as they were saved
    force: bool = False  # replace an earlier export
    integrity: Integrity = XXH3  # how the source must be proved


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What was written. --json prints it."""

    schema: int
    source: str
    step: int
    incarnation: int | None  # none of a checkpoint that is not ckptd's
    format: Format
    out: str
    files: list[str]
    tensors: int
    nbytes: int  # of the files
    leaves_left_out: int  # values that are no tensors
    averaged_steps: list[int]  # of the checkpoints whose mean it is, the newest first; empty: of one checkpoint
    notes: list[str]  # what is to be known of the checkpoint, and what is wrong with others of the job
    seconds: float


def export(order: Order, report: Callable[[int, int], None] = lambda _done, _total: None) -> Summary:
    """Writes the files, durable, and says what it did. report: bytes of tensors written so far, and in all.

    Raises UsageError, DamagedError or another CkptdError; then nothing new has a name that a reader looks at.
    """
    began_s = time.monotonic()
    out = resolved(order.out)
    if order.choice.dtype or order.average > 1:
        casts.require_numpy()
    try:
        source, notes = _open(order)
        _check_out(order, out, source.path)
        chosen = choose(source, order.choice)
        notes += not_averaged(chosen, source.step) if isinstance(source, Averaged) else []
        leaves = _leaves(order, source)
        plans = _plans(order, out, chosen, leaves, source)
        files = _write(order, out, plans, source, report)
    except OSError as error:
        raise CkptdError(f"not exported: {error}", hint=f"mend that, then again: {_again(order)}") from error
    return Summary(
        schema=SCHEMA, source=source.path, step=source.step, incarnation=source.incarnation,
        format=order.format, out=out, files=files, tensors=len(chosen), nbytes=sum(plan.nbytes for plan in plans),
        leaves_left_out=source.leaves - len(leaves),
        averaged_steps=source.steps if isinstance(source, Averaged) else [], notes=notes,
        seconds=time.monotonic() - began_s,
    )  # fmt: skip


def _open(order: Order) -> tuple[Source, list[str]]:
    """The checkpoint; what is to be known of it, and what is wrong with others of its job."""
    path, integrity = order.source, order.integrity
    zero = find_deepspeed(path)
    if zero is not None:
        if order.average > 1:
            raise UsageError(f"{path} is a ZeRO checkpoint, and only ckptd's are averaged", hint="without --average")
        if integrity.keyed:
            raise IntegrityError(f"{path} is a ZeRO checkpoint, which proves nothing", hint="--integrity xxh3")
        return ZeroCheckpoint(zero), []
    if order.average > 1:
        return load_last(path, order.average, integrity)
    found, notes = find(path, integrity)
    checkpoint = load(found, integrity)
    doubted = [f"step {checkpoint.step}: {checkpoint.doubted}"] if checkpoint.doubted else []
    return checkpoint, [*doubted, *notes]


def _again(order: Order) -> str:
    return f"ckptd export {order.source} {order.out}"


def _check_out(order: Order, out: str, source: str) -> None:
    if os.path.realpath(out).startswith(source + os.sep) or os.path.realpath(out) == source:
        raise UsageError(f"{out} lies in the checkpoint itself", hint="choose an OUT elsewhere")
    directory = order.format in _DIRECTORIES
    if directory and os.path.isdir(out) and has_records(os.listdir(out)):
        raise UsageError(f"{out} is a checkpoint itself", hint="choose an OUT elsewhere; --force replaces exports only")
    if not directory and os.path.isdir(out):
        raise UsageError(f"{out} is a directory", hint=f"name a file in it: {os.path.join(order.out, 'model.pt')}")
    if directory and os.path.exists(out) and not os.path.isdir(out):
        raise UsageError(f"{out} is a file", hint="name a directory, or add --format torch")
    parent = os.path.dirname(out)
    if not os.path.isdir(parent):
        raise UsageError(f"{parent}, where OUT should be made, is no directory", hint=f"mkdir -p {parent}")
    if os.path.exists(out) and not order.force and not (directory and not os.listdir(out)):
        raise UsageError(f"{out} is there already", hint=f"replace it: {_again(order)} --force")


def _leaves(order: Order, source: Source) -> dict[str, bytes]:
    """Values that are no tensors and are exported too, by their new name."""
    if order.format != "dcp":
        return {}
    leaves = source.stock_leaves()
    return {new_name(name, order.choice): data for name, data in leaves.items() if wanted(name, order.choice)}


def _plans(order: Order, out: str, chosen: list[Chosen], leaves: dict[str, bytes], source: Source) -> list[FilePlan]:
    """The files, last the one without which a reader finds none of the others."""
    if order.format == "safetensors":
        return safetensors_out.plan_files(chosen, order.max_shard_nbytes)
    paths = source.paths
    if order.format == "dcp":
        names = {new_name(name, order.choice): name for name in paths if wanted(name, order.choice)}
        placed = {new: paths[name] if new == name else (("k", new),) for new, name in names.items()}
        return dcp_out.plan_files(chosen, leaves, placed, source, order.max_shard_nbytes)
    return [torch_out.plan_file(os.path.basename(out), chosen, paths if order.nested else None)]


def _write(
    order: Order, out: str, plans: list[FilePlan], source: Source, report: Callable[[int, int], None]
) -> list[str]:
    """Names of the files, all written, synced and renamed."""
    fs = FileLayer(integrity=XXH3)  # what it writes has no digests of ours
    directory = out if order.format in _DIRECTORIES else os.path.dirname(out)
    made = order.format in _DIRECTORIES and fs.mkdir(directory)
    total = sum(_nbytes(tensor, dtype) for plan in plans for tensor, dtype, _ in plan.targets)
    outputs = [OutputFile(fs, directory, plan) for plan in plans + _index(order, plans, total)]
    try:
        _check_space(fs, directory, sum(plan.nbytes for plan in plans))
        for output in outputs:
            output.open()
        with VerifiedReader(source.files, min(_MOST_BLOCKS, _BLOCKS + 2 * (order.average - 1))) as reader:
            write_files(plans, outputs, reader, lambda done: report(done, total))
            reader.check_crcs()
        for output in outputs:
            output.sync()
            output.close()
        _remove_earlier(fs, directory, outputs, order.format)
        for output in outputs:
            output.publish()
    except BaseException:
        for output in outputs:
            output.discard()
        if made:
            with contextlib.suppress(OSError):
                fs.rmdir(directory)
        raise
    for path in (directory, os.path.dirname(directory)):
        fs.fsync_dir(path)
    return [os.path.basename(output.path) for output in outputs]


def _nbytes(tensor: Tensor, dtype: str) -> int:
    return math.prod(tensor.shape) * itemsize(dtype)


def _index(order: Order, plans: Sequence[FilePlan], total: int) -> list[FilePlan]:
    """The index of safetensors as one more file, published last."""
    if order.format != "safetensors":
        return []
    raw = safetensors_out.index_json(plans, total)
    return [FilePlan(safetensors_out.INDEX, len(raw), ((0, raw),), (), ())]


def _check_space(fs: FileLayer, directory: str, nbytes: int) -> None:
    free, _ = fs.space(directory)
    if nbytes > free:
        raise CkptdError(
            f"{directory}: {human.size(nbytes)} needed, {human.size(free)} free",
            hint="free some, choose another OUT, leave tensors out with --only, or cast with --dtype BF16",
        )


def _remove_earlier(fs: FileLayer, directory: str, outputs: Sequence[OutputFile], form: Format) -> None:
    """An earlier export, index first: without it nobody takes a mix of both for a model. And what a killed one left."""
    index, is_output = _EARLIER[form]
    kept = {os.path.basename(output.temp) for output in outputs}
    ours = {os.path.basename(output.path) for output in outputs}
    for name in sorted(fs.listdir(directory), key=lambda name: name != index):
        of = name[1:].rpartition(".tmp-")[0] if is_temp(name) else name
        left = is_temp(name) and of in ours
        if name not in kept and (left or is_output(of)):
            fs.unlink(os.path.join(directory, name))
