"""``ckptd export``: a checkpoint as files that other programs open. Needs no daemon."""

import click
import msgspec

from ckptd.checkpoint.export.casts import TARGETS
from ckptd.checkpoint.export.names import Choice
from ckptd.checkpoint.export.run import Format, Order, Summary, export
from ckptd.cli import common
from ckptd.cli.counting import counting
from ckptd.shared.base.errors import UsageError
from ckptd.shared.files.paths import resolved
from ckptd.shared.format.integrity import Integrity
from ckptd.system import human
from ckptd.system.units import parse_size


@click.command(
    epilog=common.example(
        "ckptd export /scratch/$USER/ckpt/llama-7b out --only model --strip model",
        "ckptd export --format torch --dtype BF16 STEP-DIRECTORY model.pt",
        "ckptd export ZERO-CHECKPOINT out --only model --strip model --dtype BF16",
        "ckptd export /scratch/$USER/ckpt/llama-7b out --only model --average 5",
    )
)
@click.argument("source", type=click.Path())
@click.argument("out", type=click.Path())
@click.option(
    "--format",
    "form",
    type=click.Choice(["safetensors", "torch", "dcp"]),
    default="safetensors",
    show_default=True,
    help="safetensors: OUT is a directory, with shards and index as HuggingFace has them. torch: OUT is one file for "
    "torch.load(OUT, weights_only=True). dcp: OUT is a directory for torch.distributed.checkpoint.load, with the "
    "shards of all ranks and the values that are no tensors.",
)
@click.option("--max-shard-size", default="5G", show_default=True, metavar="SIZE", help="Of a file in a directory.")
@click.option("--only", multiple=True, metavar="PREFIX", help="Only names that begin so, such as model. Repeatable.")
@click.option("--strip", default="", metavar="PREFIX", help="Take it off the names.")
@click.option(
    "--map", "map_path", type=click.Path(), metavar="FILE", help="JSON of new names by old ones. Others keep theirs."
)
@click.option(
    "--dtype",
    type=click.Choice(TARGETS),
    help="Cast BF16, F16, F32 and F64, but for tensors of no dimensions, such as an optimizer's step. Needs numpy.",
)
@click.option(
    "--average", type=click.IntRange(2), metavar="N",
    help="The mean of the last N checkpoints of the job, in F32 (of F64 in F64). What is no floating-point tensor "
    "is of the newest. Needs numpy.",
)  # fmt: skip
@click.option(
    "--nested",
    is_flag=True,
    help="torch: nested as it was saved, not one flat dict. For weights: what is no tensor stays behind, such as the "
    "param_groups of an optimizer.",
)
@click.option("--force", is_flag=True, help="Replace an earlier export.")
@common.json_option
@common.integrity_options
def command(  # noqa: PLR0913, PLR0917  # a flag each
    source: str,
    out: str,
    form: Format,
    max_shard_size: str,
    only: tuple[str, ...],
    strip: str,
    map_path: str | None,
    dtype: str | None,
    average: int | None,
    nested: bool,
    force: bool,
    as_json: bool,
    integrity: Integrity,
) -> None:
    """Write the whole tensors of SOURCE, a checkpoint or a job's directory (its newest), to OUT.

    Put together from all ranks, every digest checked on the way; damage leaves nothing behind and exit code 1.
    Other values than tensors stay behind, but for dcp, which has those of rank 0. SOURCE may be a ZeRO checkpoint
    of DeepSpeed's too: the directory of save_checkpoint, or of one tag.
    """
    if nested and (form != "torch" or strip or map_path):
        raise UsageError("--nested goes with --format torch, and without --strip and --map")
    choice = Choice(only=only, strip=strip, renames=_renames(map_path), dtype=dtype)
    order = Order(
        source=source, out=out, format=form, max_shard_nbytes=_size(max_shard_size), choice=choice, nested=nested,
        average=average or 1, force=force, integrity=integrity,
    )  # fmt: skip
    with counting("exporting", quiet=as_json) as progress:
        summary = export(order, progress)
    if as_json:
        common.print_json(summary)
    else:
        _tell(summary)


def _size(text: str) -> int:
    try:
        nbytes = parse_size(text)
    except ValueError as error:
        raise UsageError(f"--max-shard-size: {error}", hint="such as 5G or 500M") from None
    if not nbytes:
        raise UsageError("--max-shard-size is 0", hint="such as 5G or 500M")
    return nbytes


def _renames(path: str | None) -> dict[str, str]:
    if path is None:
        return {}
    hint = 'it holds {"old.name": "new.name", ...}'
    try:
        with open(resolved(path), "rb") as file:
            return msgspec.json.decode(file.read(), type=dict[str, str])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"--map {path}: {error}", hint=hint) from None


def _tell(summary: Summary) -> None:
    speed = human.rate(summary.nbytes / summary.seconds) if summary.seconds else "-"
    click.echo(
        f"step {summary.step}: {human.counted(summary.tensors, 'tensor')}, {human.size(summary.nbytes)} in "
        f"{human.counted(len(summary.files), 'file')} in {human.duration(summary.seconds)} ({speed}): "
        f"{human.printable(summary.out)}"
    )
    why = "of other ranks, or not chosen" if summary.format == "dcp" else "because no tensor"
    if summary.averaged_steps:
        click.echo(f"mean of steps {', '.join(map(str, summary.averaged_steps))}")
    left_out = [f"left behind, {why}: {human.counted(summary.leaves_left_out, 'value')}"]
    for note in (left_out if summary.leaves_left_out else []) + summary.notes:
        click.echo(f"{click.style('note:', dim=True)} {human.printable(note)}")
