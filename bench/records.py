"""``python -m bench.records``: what the records of a large job cost: bytes, a commit, one rank's part in loads.

8,192 ranks on 1,024 nodes with 2,700 boxes each, as FSDP2 shards a model of 405 billion parameters with AdamW. Votes,
manifest and COMMITTED are the product's own; images are sparse files of their size, so a memory file system will do.
Layouts are made by the writer for each kind of rank; other ranks of the kind have the same plan and form, and their own
part. The other load is of half as many ranks: what one of them reads of records, and its time until it knows which
bytes of which images it wants. ``explicit`` has 22 million boxes, each of its own size at its own place, which no mesh
and placement reproduces.
"""

import argparse
import contextlib
import functools
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptd.shared.base.ids import JobKey, SaveId, file_name
from ckptd.shared.format.committed import open_records
from ckptd.shared.format.digest import KIND, block_count
from ckptd.shared.format.integrity import XXH3
from ckptd.shared.format.layout import VERSION as LAYOUT_VERSION
from ckptd.shared.format.layout import Layout, Leaf, Leaves, Planned, TensorEntry, box_nbytes, encode_leaves
from ckptd.shared.format.manifest import VERSION, FileRecord, Vote
from ckptd.shared.format.packed_layout import Parts, Spread, encode_layout, joined, parted
from ckptd.shared.format.placement import Mesh, Placed, box_at
from ckptd.shared.format.set_places import SETS_DIR, set_folder
from ckptd.shared.protocol.messages import Tier
from ckptd.shared.protocol.status import SILENT_S
from ckptd.shared.stores.directory import DirectoryFiles
from ckptd.shared.torchfile.image import Box, make_image, make_layout
from ckptd.store.posix.commit import write_vote
from ckptd.store.posix.image_writer import make_set
from ckptd.store.posix.scan import Place
from ckptd.store.posix.store import PosixStore
from ckptd.system.files import FileLayer
from ckptd_client._load.checkpoint import Checkpoint
from ckptd_client._load.needed import needed_saves
from ckptd_client._load.reader import open_file
from ckptd_client._local.rank import Group
from ckptd_client._state import reshard
from ckptd_client._state.naming import NOTHING_NAMED
from ckptd_client._state.reshard import cover
from ckptd_client._state.tensors import is_tensor, shard_of
from ckptd_client._state.tree import flatten
from ckptd_client.dcp._content import Content

_NODE_RANKS, _SET = 8, 8
_MOST_ROWS, _HEAD = 64, 400  # of an explicit box: its rows at most, and bytes before it in its archive
_STORE_ID = "0" * 32
_SAVE = SaveId(1, 1, 100, bytes(range(16)))
_LAYERS, _HIDDEN, _FFN, _KV, _WORDS = 126, 16384, 53248, 1024, 128256
_COPIES = ("model", "master", "exp_avg", "exp_avg_sq", "average")  # of each parameter, until there are enough boxes
BARS = {"placed": (2.0, 200 * 10**6), "explicit": (20.0, 400 * 10**6)}  # commit in seconds, bytes of all records
_MOST_READ = 10**6


def shapes() -> dict[str, tuple[int, ...]]:
    """Of a model of 405 billion parameters."""
    found = {"embed.weight": (_WORDS, _HIDDEN), "output.weight": (_WORDS, _HIDDEN)}
    for layer in range(_LAYERS):
        for name, rows in (("wq", _HIDDEN), ("wk", _KV), ("wv", _KV), ("wo", _HIDDEN), ("w1", _FFN), ("w3", _FFN)):
            found[f"layers.{layer}.{name}.weight"] = (rows, _HIDDEN)
        found[f"layers.{layer}.w2.weight"] = (_HIDDEN, _FFN)
    return found


def tensors(count: int) -> dict[str, tuple[int, ...]]:
    """As many as asked for: parameters, and what an optimizer keeps of them."""
    return dict([(f"{copy}.{name}", shape) for copy in _COPIES for name, shape in shapes().items()][:count])


def boxes_of(rank: int, ranks: int, count: int) -> tuple[list[Box], dict[str, Placed]]:
    """The rank's boxes, and their placements. Of a tensor with fewer rows than ranks the last ranks have none."""
    boxes, placed, mesh = [], {}, Mesh((ranks,), (rank,))
    for name, shape in tensors(count).items():
        offsets, sizes = box_at(shape, mesh, (0,))
        placed[name] = Placed(0, (0,))
        if 0 not in sizes:
            boxes.append(Box(name, "F32", sizes, shape, offsets))
    return boxes, placed


class Rank(NamedTuple):
    """What a rank leaves in its slot beside the image."""

    parts: Parts
    nbytes: int


class Writer:
    """Layouts of all ranks: those whose boxes have equal sizes are planned once."""

    def __init__(self, ranks: int, count: int, *, explicit: bool) -> None:
        self.ranks, self.count, self.explicit = ranks, count, explicit
        self._planned: dict[tuple[int, ...], tuple[Layout, Rank]] = {}
        self._chance = random.Random(1)
        self._rows = sorted({shape[0] for shape in shapes().values()})
        self.boxes = 0

    def rank(self, rank: int) -> Rank:
        """The rank's layout."""
        kind = tuple(box_at((rows,), Mesh((self.ranks,), (rank,)), (0,))[1][0] for rows in self._rows)
        if kind not in self._planned:
            boxes, placed = boxes_of(rank, self.ranks, self.count)
            image = make_image(boxes, rank=rank, world_size=self.ranks)
            paths = {name: tuple(("k", step) for step in name.split(".")) for name in tensors(self.count)}
            absent = [Planned(name, "F32", shape) for name, shape in tensors(self.count).items()]
            layout = make_layout(image, paths=paths, aliases={})
            raw = encode_layout(
                layout, Spread(absent, [Mesh((self.ranks,), (rank,), tuple(range(self.ranks)))], placed)
            )
            self._planned[kind] = layout, Rank(parted(raw, "bench"), image.image_nbytes)
        layout, found = self._planned[kind]
        if self.explicit:
            return self._scattered(rank, layout)
        self.boxes += len(layout.tensors)
        own = msgspec.msgpack.decode(found.parts.own) | {"rank": rank, "places": [[rank]]}
        return found._replace(parts=found.parts._replace(own=msgspec.msgpack.encode(own)))

    def leaves(self) -> bytes:
        """Four states of random generators, say."""
        leaves = {f"rng.{n}": Leaf("safe/1", self._chance.randbytes(256)) for n in range(4)}
        return encode_leaves(Leaves(LAYOUT_VERSION, leaves))

    def _scattered(self, rank: int, layout: Layout) -> Rank:
        """A box of each tensor, of rows of the rank's own: no mesh and placement reproduces them."""
        chance, end = random.Random(rank), layout.header_nbytes
        entries = []
        for name, shape in tensors(self.count).items():
            rows = chance.randint(1, _MOST_ROWS)
            offsets, sizes = (chance.randrange(shape[0] - rows), 0), (rows, shape[1])
            nbytes = box_nbytes("F32", sizes)
            entries.append(
                TensorEntry(name, "F32", shape, offsets, sizes, end + _HEAD, nbytes, end, nbytes + 3 * _HEAD)
            )
            end += nbytes + 3 * _HEAD
        own = msgspec.structs.replace(layout, rank=rank, file=file_name(rank), image_nbytes=end, tensors=entries)
        self.boxes += len(entries)
        return Rank(parted(encode_layout(own), "bench"), end)


def drain(key: JobKey, writer: Writer) -> None:
    """All nodes' images, sparse, and their votes."""
    fs, place, chance = FileLayer(), Place(key, _SAVE), random.Random(2)
    for node in range(-(-writer.ranks // _NODE_RANKS)):
        folder = set_folder(1, [f"node{node // _SET * _SET + member:05d}" for member in range(_SET)])
        make_set(fs, place, folder)
        records = []
        for rank in range(node * _NODE_RANKS, min(writer.ranks, (node + 1) * _NODE_RANKS)):
            found = writer.rank(rank)
            with open(os.path.join(place.partial, file_name(rank)), "wb") as file:
                file.truncate(found.nbytes)
            records.append(
                FileRecord(
                    name=file_name(rank), rank=rank, nbytes=found.nbytes, leaves=writer.leaves(),
                    digests=chance.randbytes(16 * block_count(found.nbytes)), **found.parts._asdict(),
                )
            )  # fmt: skip
        vote = Vote(
            version=VERSION, digest_kind=KIND, store_id=_STORE_ID, job=key.job, save=_SAVE, node=f"node{node:05d}",
            folder=folder, world_size=writer.ranks, files=records,
        )  # fmt: skip
        write_vote(fs, key, vote)


class Read(DirectoryFiles):
    """Counts what is read of records."""

    nbytes = opens = 0

    def read(self, name: str, max_nbytes: int) -> bytes:
        """As StoredFiles."""
        data = super().read(name, max_nbytes)
        Read.nbytes += len(data)
        Read.opens += 1
        return data


@contextlib.contextmanager
def half(ranks: int, count: int) -> Iterator[tuple[Group, dict[str, Any]]]:
    """A rank of half as many ranks, and its state; torch.distributed is as this rank has it."""
    group = Group(ranks // 4 + 1, ranks // 2, "bench")
    dist.init_process_group("fake", store=FakeStore(), rank=group.rank, world_size=group.world_size)
    try:
        mesh = DeviceMesh("cpu", torch.arange(group.world_size))
        state: dict[str, Any] = {}
        for name, shape in tensors(count).items():
            _, sizes = box_at(shape, Mesh((group.world_size,), (group.rank,)), (0,))
            *path, last = name.split(".")
            inner = functools.reduce(lambda at, step: at.setdefault(step, {}), path, state)
            local = torch.empty(1).expand(sizes)  # one element: nothing is read into it
            inner[last] = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=shape, stride=(shape[1], 1)
            )
        yield group, state | {"rng": {str(number): b"" for number in range(4)}}
    finally:
        dist.destroy_process_group()


def read_by_half(final: Path, group: Group, state: dict[str, Any]) -> tuple[int, int]:
    """Finds where the state lies, as a load does. Returns how many images were looked at, and runs of bytes."""
    records = open_records(Read(str(final), XXH3))
    index = records.common
    assert index is not None  # noqa: S101 - of more than one node
    found = needed_saves(records, index, state, group, NOTHING_NAMED)
    runs = 0
    for name, tensor in flat_tensors(state):
        for chunk in shard_of(tensor, name).chunks:
            runs += len(cover(reshard.Box(*chunk.box), found.saves.boxes[name], prefer=found.saves.rank) or ())
    return len(found.ranks), runs


def planned_by_half(final: Path, group: Group, state: dict[str, Any]) -> tuple[int, int]:
    """The same as DCP's planner and CkptdReader do it."""
    files = Read(str(final), XXH3)
    records = open_records(files)
    found = Checkpoint(
        {}, save=_SAVE, tier=Tier.PFS, stored=files, opener=lambda rank: open_file(records, rank), records=records
    )
    content = Content(found, 0, group.world_size)
    planner = DefaultLoadPlanner()
    planner.set_up_planner(state, content.metadata, is_coordinator=True)
    wanted: dict[str, list[reshard.Box]] = {}
    for item in planner.create_local_plan().items:
        name = item.storage_index.fqn
        if item.type == LoadItemType.BYTE_IO:
            content.leaf(name)
        else:
            wanted.setdefault(name, []).append(reshard.Box(tuple(item.storage_offsets), tuple(item.lengths)))
    boxes = content.boxes(wanted)
    runs = [run for name, some in wanted.items() for box in some for run in cover(box, boxes[name], prefer=0) or ()]
    return len({saved.rank for some in boxes.values() for saved in some}), len(runs)


_READERS: dict[str, Callable[[Path, Group, dict[str, Any]], tuple[int, int]]] = {
    "half": read_by_half, "dcp_half": planned_by_half,
}  # fmt: skip


def read_by(name: str, final: Path, ranks: int, count: int) -> dict[str, Any]:
    """What a rank of half as many ranks reads of records, until it knows where its part of the state lies."""
    with half(ranks, count) as (group, state):
        Read.nbytes = Read.opens = 0
        began, cpu = time.monotonic(), time.process_time()
        images, runs = _READERS[name](final, group, state)
        return {
            f"{name}_read_nbytes": Read.nbytes, f"{name}_opens": Read.opens,
            f"{name}_s": round(time.monotonic() - began, 2), f"{name}_cpu_s": round(time.process_time() - cpu, 2),
            f"{name}_images": images, f"{name}_runs": runs,
        }  # fmt: skip


def flat_tensors(state: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """With their names."""
    flat = flatten(state, is_tensor)
    yield from ((name, value) for name, value in zip(flat.names, flat.values, strict=True) if is_tensor(value))


def walk(folder: Path) -> Iterator[int]:
    """Bytes of each record."""
    yield from (path.stat().st_size for path in folder.glob(f"{SETS_DIR}/*/*.vote"))
    yield from (path.stat().st_size for path in folder.glob("ckptd.*"))


def measure(kind: str, ranks: int, count: int, scratch: str) -> dict[str, Any]:
    """One row."""
    key = JobKey(tempfile.mkdtemp(prefix="ckptd-bench-", dir=scratch), "job")
    try:
        writer = Writer(ranks, count, explicit=kind == "explicit")
        began = time.monotonic()
        drain(key, writer)
        made_s = time.monotonic() - began
        alive: list[float] = []
        began, cpu = time.monotonic(), time.process_time()
        outcome = PosixStore(key.store, XXH3).commit(
            key.job, _SAVE, "bench", alive=lambda: alive.append(time.monotonic())
        )
        commit_s, commit_cpu_s = time.monotonic() - began, time.process_time() - cpu
        silent_s = max(
            after - before for before, after in zip([began, *alive], [*alive, began + commit_s], strict=True)
        )
        final = Path(key.store, key.job, _SAVE.dirname)
        Read.nbytes = Read.opens = 0
        began = time.monotonic()
        rank = ranks // 2 + 3
        records = open_records(Read(str(final), XXH3))
        layout = records.layout(rank)
        load_s = time.monotonic() - began
        return {
            "kind": kind, "ranks": ranks, "boxes": writer.boxes, "records_nbytes": sum(walk(final)),
            "manifest_nbytes": next(final.glob("ckptd.*.manifest")).stat().st_size, "commit_s": round(commit_s, 2),
            "commit_cpu_s": round(commit_cpu_s, 2), "signs_of_life": len(alive),
            "longest_silence_s": round(silent_s, 2),
            "read_nbytes_a_rank": Read.nbytes, "opens_a_rank": Read.opens, "read_s": round(load_s, 3),
            "layout_nbytes_a_rank": len(joined(records[rank].layout)), "boxes_a_rank": len(layout.tensors),
            **{figure: of for name in _READERS if kind == "placed"
               for figure, of in read_by(name, final, ranks, count).items()},
            "left_out": outcome.committed.left_out, "made_s": round(made_s, 1),
        }  # fmt: skip
    finally:
        shutil.rmtree(key.store)


def missed(row: dict[str, Any]) -> list[str]:
    """Bars that a full-sized row misses."""
    most_s, most_nbytes = BARS[row["kind"]]
    bars = {
        f"commit <= {most_s:g} s": row["commit_s"] <= most_s,
        f"records <= {most_nbytes // 10**6} MB": row["records_nbytes"] <= most_nbytes,
        "a rank reads <= 1 MB": max(
            row["read_nbytes_a_rank"], *(row.get(f"{name}_read_nbytes", 0) for name in _READERS)
        )
        <= _MOST_READ,
        f"a sign of life every {SILENT_S:g} s": row["longest_silence_s"] <= SILENT_S,
    }
    return [bar for bar, held in bars.items() if not held]


def _read(row: dict[str, Any], name: str) -> str:
    if f"{name}_opens" not in row:
        return "all votes"
    nbytes, opens, cpu_s = (row[f"{name}_{figure}"] for figure in ("read_nbytes", "opens", "cpu_s"))
    return f"{nbytes / 1e6:.2f} MB in {opens} files, {cpu_s:.2f} s of CPU"


_FIGURES: dict[str, Callable[[dict[str, Any]], str]] = {
    "ranks": lambda row: f"{row['ranks']:,}",
    "boxes": lambda row: f"{row['boxes']:,}",
    "records": lambda row: f"{row['records_nbytes'] / 1e6:.1f} MB",
    "commit": lambda row: f"{row['commit_s']:.2f} s, {row['commit_cpu_s']:.2f} s of CPU",
    "its signs of life": lambda row: f"{row['signs_of_life']:,}, at most {row['longest_silence_s']:.2f} s apart",
    "read by a rank": lambda row: f"{row['read_nbytes_a_rank'] / 1e6:.2f} MB in {row['opens_a_rank']} files",
    "read by one of half as many": lambda row: _read(row, "half"),
    "the same by CkptdReader": lambda row: _read(row, "dcp_half"),
    "bars missed": lambda row: ", ".join(missed(row)) or "none",
}


def main() -> int:
    """Exit status 1 when a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.records", description=__doc__)
    parser.add_argument("--ranks", type=int, default=8192)
    parser.add_argument("--boxes", type=int, default=2700, help="of a rank, at most")
    parser.add_argument("--kinds", nargs="*", default=list(BARS))
    parser.add_argument("--scratch", default="/dev/shm", help="where the checkpoints are made")  # noqa: S108
    parser.add_argument("--keep", help="a JSON file for the figures")
    options = parser.parse_args()
    rows = [measure(kind, options.ranks, options.boxes, options.scratch) for kind in options.kinds]
    table = Table("", *(row["kind"] for row in rows))
    for name, figure in _FIGURES.items():
        table.add_row(name, *map(figure, rows))
    Console().print(table)
    if options.keep:
        Path(options.keep).write_text(json.dumps(rows, indent=2) + "\n")
    return int(any(map(missed, rows)))


if __name__ == "__main__":
    sys.exit(main())
