"""``python -m bench.format``: the cost of the format: bytes and layout time of images, and exports, with bars.

Bytes and layout: a rank of Llama-8B over 64 ranks, with bf16 weights and AdamW's fp32 master and moments, as FSDP2
shards rows, and as FSDP2 over tensor parallelism distributes them by strides. No process group: the boxes are what the
placements give. Export: a checkpoint of 2 GiB, beside large sequential reads and writes of as many bytes.
"""

import argparse
import contextlib
import gc
import itertools
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from bench.node import OUT, Node, scratch
from bench.states import realistic
from bench.yardsticks import Yardsticks
from ckptd.shared.format.layout import box_nbytes
from ckptd.shared.format.packed_layout import encode_layout
from ckptd.shared.torchfile.image import Box, make_image, make_layout
from ckptd_client._state import strided

RANKS = 64
_LAYERS, _HIDDEN, _FFN, _KV, _WORDS = 32, 4096, 14336, 1024, 128256
_MAX_SHARE = 0.001
_MAX_LAYOUT_S = 0.05
_MIN_RATE = 0.8
_MAX_EXPORT_NBYTES = 256 << 20
_COPIES = (("model", "BF16"), ("master", "F32"), ("exp_avg", "F32"), ("exp_avg_sq", "F32"))


def llama_8b() -> dict[str, tuple[int, ...]]:
    """Names and shapes of its parameters."""
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (_WORDS, _HIDDEN), "output.weight": (_WORDS, _HIDDEN)}
    shapes["norm.weight"] = (_HIDDEN,)
    block: dict[str, tuple[int, ...]] = {
        "attention.wq": (_HIDDEN, _HIDDEN), "attention.wk": (_KV, _HIDDEN), "attention.wv": (_KV, _HIDDEN),
        "attention.wo": (_HIDDEN, _HIDDEN), "ffn.w1": (_FFN, _HIDDEN), "ffn.w2": (_HIDDEN, _FFN),
        "ffn.w3": (_FFN, _HIDDEN), "attention_norm": (_HIDDEN,), "ffn_norm": (_HIDDEN,),
    }  # fmt: skip
    for layer in range(_LAYERS):
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in block.items()}
    return shapes


def fsdp_boxes(rank: int) -> list[Box]:
    """A rank's rows of everything."""
    boxes = []
    for name, shape in llama_8b().items():
        rows = -(-shape[0] // RANKS)
        first = min(rank * rows, shape[0])
        sizes = (min(rows, shape[0] - first), *shape[1:])
        boxes += _copies(name, shape, [((first, *(0,) * (len(shape) - 1)), sizes)])
    return boxes


def tensor_parallel_boxes(rank: int, ranks: int = 8) -> list[Box]:
    """A rank's boxes on a mesh of data by tensor parallel ranks: rows cut by both, or rows and columns.

    Computes the geometry again, as the first plan of a process does.
    """
    strided.distributed.cache_clear()
    mesh, coordinate = (RANKS // ranks, ranks), divmod(rank, ranks)
    boxes = []
    for name, shape in llama_8b().items():
        placements: tuple[Any, ...] = (Shard(0),)
        if "wo" in name or "w2" in name:
            placements = (Shard(0), Shard(1))
        elif len(shape) > 1:
            placements = (_StridedShard(0, split_factor=ranks), Shard(0))
        local = list(shape)
        for placement, parts in zip(placements, mesh, strict=False):
            local[placement.dim] //= parts
        for kind, _ in _COPIES:
            distributed = strided.distributed(shape, mesh, coordinate, placements, tuple(local))
            if len(distributed) != 1:
                raise RuntimeError(f"{name}: {len(distributed)} geometries")
            boxes += _copies(name, shape, [(box.offsets, box.sizes) for box in distributed[0]], kind)
    return boxes


def _copies(name: str, shape: tuple[int, ...], found: list[Any], kind: str = "") -> list[Box]:
    return [
        Box(f"{copy}.{name}", code, sizes, shape, offsets, part)
        for copy, code in _COPIES
        if kind in ("", copy)
        for part, (offsets, sizes) in enumerate(found)
    ]


def laid_out(boxes_of: Callable[[int], list[Box]], repeat: int) -> tuple[float, float]:
    """(share of bytes beyond the tensors', over all ranks; the median seconds of laying out one, geometry included)."""
    payload = total = 0
    for rank in range(RANKS):
        boxes = boxes_of(rank)
        payload += sum(box_nbytes(box.dtype, box.sizes) for box in boxes)
        total += make_image(boxes, rank=rank, world_size=RANKS).image_nbytes
    seconds = []
    for rank in range(repeat):
        gc.collect()
        began = time.perf_counter()
        boxes = boxes_of(rank)
        image = make_image(boxes, rank=rank, world_size=RANKS)
        paths = {box.name: (("k", box.name),) for box in boxes}
        encode_layout(make_layout(image, paths=paths, aliases={}))
        seconds.append(time.perf_counter() - began)
    return total / payload - 1, statistics.median(seconds)


_EXPORT = """
import sys, time
from ckptd.checkpoint.export.run import Order, export
began = time.perf_counter()
export(Order(source=sys.argv[1], out=sys.argv[2], format=sys.argv[3]))
seconds = time.perf_counter() - began
status = dict(line.split(":", 1) for line in open("/proc/self/status"))  # getrusage has the peak of the parent
print(seconds, int(status["VmHWM"].split()[0]) << 10)
"""


def exported(source: str, out: Path, form: str) -> tuple[float, int]:
    """Seconds and peak memory of a process that exports."""
    target = out / ("out.pt" if form == "torch" else "out")
    done = subprocess.run(
        [sys.executable, "-c", _EXPORT, source, str(target), form], check=True, capture_output=True, text=True
    )
    seconds, nbytes = done.stdout.split()
    subprocess.run(["rm", "-rf", str(target)], check=True)
    return float(seconds), int(nbytes)


def export_rows(nbytes: int, repeat: int, forms: list[str]) -> Iterator[tuple[str, str, str, bool]]:
    """Each format, in turn with reads and writes of as many bytes."""
    import ckptd_client  # noqa: PLC0415

    with scratch(OUT) as (shm, disk), contextlib.closing(Node(shm, disk / "store")) as node:
        node.start()
        state = realistic(nbytes)
        with ckptd_client.connect("export", store=str(node.store), arena=str(node.arena), start=False) as client:
            handle = client.save(state, 1)
            client.wait("durable", 300)
        source = os.path.join(node.store, "export", handle.save_id.dirname)
        del state
        size = sum(entry.stat().st_size for entry in os.scandir(source) if entry.is_file())
        with contextlib.closing(Yardsticks(size, shm, disk)) as yard:
            for form in forms:
                marks, found = [], []
                for _ in range(repeat):
                    depths = [(yard.direct_read(d).seconds, yard.direct_write(d).seconds) for d in (1, 4)]
                    marks.append(min(r for r, _ in depths) + min(w for _, w in depths))
                    found.append(exported(source, disk, form))
                seconds, peak = statistics.median(s for s, _ in found), max(peak for _, peak in found)
                ratio = statistics.median(marks) / seconds
                text = f"{ratio:.2f} x ({seconds:.2f} s; read + write {statistics.median(marks):.2f} s)"
                yield f"export to {form}, {size / 2**30:.1f} GiB", text, f">= {_MIN_RATE} x", ratio >= _MIN_RATE
                text = f"{peak / 2**20:.0f} MiB"
                yield f"export to {form}, peak memory", text, "<= 256 MiB", peak <= _MAX_EXPORT_NBYTES


def layout_rows(repeat: int) -> Iterator[tuple[str, str, str, bool]]:
    """Both shardings."""
    for name, boxes_of in (("FSDP2", fsdp_boxes), ("FSDP2 x TP, strided", tensor_parallel_boxes)):
        share, seconds = laid_out(boxes_of, repeat)
        if not math.isfinite(share):
            raise RuntimeError(name)
        yield f"image beyond its tensors, {name}", f"+{share:.4%}", "<= +0.1 %", share <= _MAX_SHARE
        yield f"layout of a plan, {name}", f"{seconds * 1e3:.1f} ms", "<= 50 ms", seconds <= _MAX_LAYOUT_S


def main() -> None:
    """A table; exit code 1 when a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.format", description=__doc__)
    parser.add_argument("--nbytes", type=int, default=2 << 30, help="of the checkpoint that is exported")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--formats", nargs="*", default=["safetensors", "torch", "dcp"])
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    torch.set_num_threads(1)
    table = Table("what", "measured", "bar", "")
    missed = False
    found = itertools.chain(layout_rows(7), export_rows(options.nbytes, options.repeat, options.formats))
    for name, measured, bar, good in found:
        print(f"{name}: {measured} ({bar})", file=sys.stderr, flush=True)
        missed |= not good
        table.add_row(name, measured, bar, "" if good else "missed")
    Console().print(table)
    sys.exit(int(missed))


if __name__ == "__main__":
    main()
