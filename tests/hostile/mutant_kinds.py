"""Kinds of mutants: a sound tree of files, what is changed in it with its digests made right, and who reads it."""

import io
import json
import os
import pathlib
import pickle
import random
import shutil
import struct
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
import xxhash

from ckptd.arena.journal_files import JournalFile
from ckptd.arena.saved_topology import Kept, keep_topology
from ckptd.parity.record import ParitySeal
from ckptd.peers.keys import make_keys
from ckptd.shared.base.ids import JobKey
from ckptd.shared.format import arena_paths, rank_file
from ckptd.shared.format.columns import parts_in, squeezed
from ckptd.shared.format.committed import INCARNATIONS_DIR
from ckptd.shared.format.digest import digest
from ckptd.shared.format.layout import SavedFor
from ckptd.shared.format.manifest import (
    COMMITTED,
    LINKED,
    STOCK_FILES,
    STOCK_METADATA,
    UNPUBLISHED,
    decode_objects,
    decode_vote,
)
from ckptd.shared.format.origin import MARKER
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.format.slot import SEALS_NBYTES, decode_seals, encode_seal
from ckptd.shared.protocol import columns, messages
from ckptd.shared.protocol import journal as journals
from ckptd.shared.protocol.topology import Peer, Topology
from ckptd.store.scan import PINS_DIR
from ckptd.store.trainer_files import TrainerFiles
from tests.checkpoints import SAVE, image_of, put_image, put_vote, write_checkpoint
from tests.golden import wire
from tests.hostile import forge, mutant_readers
from tests.hostile.mutate import edgy, mutated, to_json, to_msgpack, torn
from tests.hostile.reader import some_state
from tests.hostile.test_through_the_daemon import Place
from tests.on_meshes import write
from tests.parity_store import Made
from tests.runs import RUN, STORE_ID, vote_in
from tests.unit.shared import test_messages
from tests.unit.store import test_journal

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "zero"
Change = Callable[[random.Random, pathlib.Path], None]


class Kind(NamedTuple):
    """tree: one of TREES. change: what makes a mutant of a copy, whose path it gets."""

    tree: str
    change: Change
    readers: dict[str, Callable[[str], object]]


# --- trees: each is made once, and gives the path that readers take, relative to its folder


def final(folder: pathlib.Path, *, boxes: bool = False) -> pathlib.Path:
    store = folder / "store"
    write_checkpoint(store, [some_state(boxes=False)], save=msgspec.structs.replace(SAVE, counter=9, step=90))
    made = write_checkpoint(store, [some_state(boxes=boxes)])
    (made.parent / PINS_DIR).mkdir()
    (made.parent / INCARNATIONS_DIR).mkdir()
    for number in (3, 4):
        (made.parent / INCARNATIONS_DIR / f"i{number:08d}").touch()
    return made


def ranks_tree(folder: pathlib.Path) -> pathlib.Path:
    """Of four ranks, on a mesh of two dimensions and on one of one: the records have an index."""
    return pathlib.Path(write(folder / "store", 4, mutant_readers.rows_of_four))


def partial_tree(folder: pathlib.Path) -> pathlib.Path:
    place = Place(JobKey(str(folder / "store"), "demo"), SAVE)
    (folder / "store").mkdir()
    image, record, objects = image_of(some_state(boxes=False), place.save)
    put_image(place, record, image)
    found = decode_objects(objects, where="objects") if objects else None
    put_vote(place, [record], world_size=1, node="node0", objects=found)
    return pathlib.Path(place.partial)


def parity_tree(folder: pathlib.Path) -> pathlib.Path:
    (folder / "store" / "demo").mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="ckptd-test-", dir="/dev/shm") as arenas:
        made = Made(folder / "store", arenas, [[50_000], [80_001, 3], [33_333]])
        return made.commit()


def arena_tree(folder: pathlib.Path) -> pathlib.Path:
    (folder / "store" / "demo").mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="ckptd-test-", dir="/dev/shm") as arenas:
        made = Made(folder / "store", arenas, [[5_000], [8_001, 3], [3_333]])
        shutil.copytree(made.set.nodes[0].arena.path, folder / "arena", ignore=shutil.ignore_patterns("*.sock", "lock"))
        made.set.stop()
    directory = folder / "arena" / arena_paths.job_dir(made.key)
    peer = Peer("n0", "arena", "tcp://127.0.0.1:4000", "k" * 40)
    keep_topology(str(folder / "arena"), Kept(made.key, "s", Topology((peer,), (0,), Scheme.NONE), 2, 2))
    name = journals.Name(3, journals.run_digits(RUN), "0" * 8, 1)
    file = JournalFile.make(str(folder / "arena"), made.key, name)
    file.append(b"".join(map(journals.framed, test_journal.ALL)))
    rank = rank_file.RankRecord(made.key, 0, "session", "host")
    (directory / arena_paths.rank_file_name(0, "session")).write_bytes(rank_file.encode(rank))
    (folder / "arena").chmod(0o700)
    return folder / "arena"


def dcp_tree(folder: pathlib.Path) -> pathlib.Path:
    state = {"w": torch.ones(4, 3), "b": torch.arange(5.0), "lr": 0.5, "seed": (1, "a", [2.5, None])}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "dcp"))
    return folder / "dcp"


def safetensors_tree(folder: pathlib.Path) -> pathlib.Path:
    path = folder / "st"
    path.mkdir()
    info = {"DCP_SHARDING_INFO": json.dumps({"a": {"saved_offsets": [0, 0]}})}
    safetensors.torch.save_file({"a": torch.ones(4, 3), "old": torch.zeros(2)}, path / "1.safetensors", info)
    safetensors.torch.save_file({"b": torch.arange(5)}, path / "2.safetensors")
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    return path


INDEX = "model.safetensors.index.json"


def zero_tree(folder: pathlib.Path, stage: str) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(GOLDEN / stage, folder / stage))


def file_tree(folder: pathlib.Path) -> pathlib.Path:
    (folder / "one").mkdir()
    (folder / "one" / "file").touch()
    return folder / "one"


STAGES = ("stage1", "stage2", "stage3", "pipeline")
TREES: dict[str, Callable[[pathlib.Path], pathlib.Path]] = {
    "final": final,
    "boxes": partial(final, boxes=True),
    "ranks": ranks_tree,
    "partial": partial_tree,
    "parity": parity_tree,
    "arena": arena_tree,
    "dcp": dcp_tree,
    "safetensors": safetensors_tree,
    "file": file_tree,
    **{stage: partial(zero_tree, stage=stage) for stage in STAGES},
}


# --- changes


def manifest(chance: random.Random, path: pathlib.Path) -> None:
    before = forge.manifest_of(path)
    forge.put_manifest(path, to_msgpack(mutated(chance, forge.plain(before))), before)


def committed(chance: random.Random, path: pathlib.Path) -> None:
    raw = json.loads((path / COMMITTED).read_bytes())
    (path / COMMITTED).write_bytes(to_json(mutated(chance, raw)))


def record_index(chance: random.Random, path: pathlib.Path) -> None:
    """Its parts, which are read of a deflated list, or its bytes."""
    (where,) = path.glob("ckptd.*.index")
    data = where.read_bytes()
    if chance.random() < 0.2:
        forge.put_index(path, torn(chance, data))
        return
    head, sizes = parts_in(data, 2, "index")
    if chance.random() < 0.1:
        sizes = torn(chance, sizes)
    else:
        raw = msgspec.msgpack.decode(head)
        if chance.random() < 0.3:  # the parts of layouts, which its kinds have
            one = chance.randrange(len(raw["shared"]))
            raw["shared"][one] = torn(chance, raw["shared"][one])
        else:
            raw = mutated(chance, raw)
        head = to_msgpack(raw)
    forge.put_index(path, squeezed([head, sizes]))


def layout(chance: random.Random, path: pathlib.Path) -> None:
    """Its parts, numbers of columns too; or the bytes of one of them."""
    found = forge.records_of(path)[0].layout
    if chance.random() < 0.2:
        part = chance.choice(found._fields)
        forge.put_part(path, part, torn(chance, getattr(found, part)))
        return
    raw = forge.opened(found)
    which = chance.choice(["plan", "form", "own", "columns"])
    changed = mutated(chance, raw[which])
    if which == "columns" and not isinstance(changed, list):
        changed = [changed]
    if which == "columns" or isinstance(changed, dict):
        raw[which] = changed
    forge.put_layout(path, forge.closed(raw, to_msgpack))


def leaves(chance: random.Random, path: pathlib.Path) -> None:
    raw = msgspec.msgpack.decode(forge.records_of(path)[0].leaves)
    if chance.random() < 0.7:  # one leaf's own bytes
        name = chance.choice(sorted(raw[1]))
        raw[1][name][1] = leaf(chance, raw[1][name][1])
    else:
        raw = mutated(chance, raw)
    forge.put_leaves(path, to_msgpack(raw))


def leaf(chance: random.Random, data: bytes) -> bytes:
    if chance.random() < 0.5:
        return torn(chance, data)
    code = chance.choice([*range(1, 20), *range(32, 38), 99])
    body = edgy(chance) if chance.random() < 0.5 else mutated(chance, [edgy(chance), edgy(chance), edgy(chance)])
    inner = to_msgpack(body)
    return b"\xc9" + len(inner).to_bytes(4, "big") + bytes([code]) + inner


def header(chance: random.Random, path: pathlib.Path) -> None:
    raw = forge.header_of(path)
    if chance.random() < 0.2:
        raw["__metadata__"]["DCP_SHARDING_INFO"] = to_json(
            mutated(chance, json.loads(raw["__metadata__"]["DCP_SHARDING_INFO"]))
        ).decode("utf-8", "replace")
    text = to_json(mutated(chance, raw)) if chance.random() < 0.7 else torn(chance, to_json(raw))
    room = int.from_bytes((path / forge.RANK0).read_bytes()[:8], "little")
    length = chance.choice([None, None, None, 0, room + 1, 1 << 40, (1 << 64) - 1])
    forge.put_header(path, text[:room], length=length)


def vote(chance: random.Random, path: pathlib.Path) -> None:
    where = vote_in(path)
    raw = forge.plain(decode_vote(where.read_bytes(), where="vote"))
    forge.put_vote(where, forge.sealed(to_msgpack(mutated(chance, raw))))


def stock(name: str, chance: random.Random, path: pathlib.Path) -> None:
    data = (path / name).read_bytes()
    forge.put_stock(path, name, pickled(chance, data) if name == STOCK_METADATA else torn(chance, data))


def pickled(chance: random.Random, data: bytes) -> bytes:
    """Numbers, texts and opcodes of a pickle."""
    if chance.random() < 0.5:
        return torn(chance, data)
    parts = [b"(", b"}", b"]", b")", b"N", b"R", b"s", b"u.", b"\x85", b"\x86", b"h\x00", b"h\x05", b"0", b"2",
             b"J\xff\xff\xff\xff", b"\x8a\x08" + b"\xff" * 8, b"\x8a\xff" + b"\x7f" * 255, b"X\xff\xff\xff\x7f",
             b"j\xff\xff\xff\x7f",
             b"cos\nsystem\n", b"\x93", b"\x8b\xff\xff\xff\x7f", b"X\x03\x00\x00\x00\xed\xa0\x80"]  # fmt: skip
    for _ in range(chance.choice([1, 2, 5])):
        at = chance.randrange(len(data) + 1)
        data = data[:at] + chance.choice(parts) + data[at + chance.choice([0, 0, 1, 2]) :]
    return data


def any_file(chance: random.Random, path: pathlib.Path) -> None:
    files = sorted(found for found in path.rglob("*") if found.is_file() and not found.is_symlink())
    chosen = chance.choice(files)
    how = chance.random()
    if how < 0.05:
        os.truncate(chosen, 1 << chance.choice([20, 33, 42]))
    elif how < 0.1:
        chosen.unlink()
    elif how < 0.15:
        forge_instead(chance, chosen)
    else:
        chosen.write_bytes(torn(chance, chosen.read_bytes()))


def forge_instead(chance: random.Random, path: pathlib.Path) -> None:
    what = chance.choice(["fifo", "directory", "nowhere", "loop"])
    path.unlink()
    if what == "fifo":
        os.mkfifo(path)
    elif what == "directory":
        path.mkdir()
    else:
        path.symlink_to("/nonexistent/file" if what == "nowhere" else path.name)


def names(chance: random.Random, path: pathlib.Path) -> None:
    """Of markers, pins, checkpoints, links."""
    job = path.parent
    number = chance.choice([0, 1, 99_999_999, 12_345_678, 5])
    made = [
        job / INCARNATIONS_DIR / f"i{number:08d}", job / INCARNATIONS_DIR / "i1", job / PINS_DIR / path.name,
        job / PINS_DIR / "\udcff", job / f"step-{number:09d}.i{number:04d}", job / f".step-000000001.i{number:04d}.tmp",
        job / ".superseded" / path.name, job / ".trash-x", job / "\udc80",
        job / f"step-000000010.i{number:04d}", path / "sets" / "\udcff", path / "UNPUBLISHED", path / "parity",
    ]  # fmt: skip
    made.append(job / f".step-000000010.i0001.partial-{number:08d}-0000000001-000000000010-{'0' * 32}")
    for chosen in chance.sample(made, chance.choice([1, 2, 4])):
        if not os.path.lexists(chosen) and chosen.parent.is_dir():
            chance.choice([pathlib.Path.mkdir, pathlib.Path.touch, lambda p: p.symlink_to("/nonexistent")])(chosen)
    if chance.random() < 0.3:
        (job / "latest").unlink()
        (job / "latest").symlink_to(
            chance.choice([".", "..", "/", "x" * 200, "latest", path.name + "/../" + path.name])
        )


def parity_vote(chance: random.Random, path: pathlib.Path) -> None:
    def change(vote: Any) -> None:
        vote["parity"] = mutated(chance, vote["parity"])

    forge.edit_vote(path, chance.randrange(len(forge.manifest_of(path).votes)), change, to_msgpack)
    if chance.random() < 0.5:
        any_file(chance, path)


def parity_record(chance: random.Random, path: pathlib.Path) -> None:
    """Its digest in the vote made right."""
    manifest = forge.manifest_of(path)
    number = chance.randrange(len(manifest.votes))
    place = path / manifest.place_of(manifest.votes[number])
    said = decode_vote(place.read_bytes(), where="vote").parity
    where = path / said.place
    data = where.read_bytes()
    record = to_msgpack(mutated(chance, msgspec.msgpack.decode(data[said.nbytes :])))
    where.write_bytes(data[: said.nbytes] + record)
    digested = {"record_nbytes": len(record), "record_digest": digest(record)}
    forge.edit_vote(path, number, lambda vote: vote["parity"].update(digested))
    if chance.random() < 0.5:
        os.unlink(path / forge.records_of(path)[0].name)


def slot_seal(chance: random.Random, path: pathlib.Path) -> None:
    (where,) = chance.sample(sorted(path.rglob("*.slot")), 1)
    data = bytearray(where.read_bytes())
    _, sequence, seal = decode_seals(bytes(data[-SEALS_NBYTES:]))
    raw = mutated(chance, forge.plain(seal))
    body = to_msgpack(raw)[:4060]
    head = (b"CKPTDSL4" + (sequence + 1).to_bytes(8, "little") + len(body).to_bytes(4, "little") + body).ljust(
        4080, b"\0"
    )
    data[-SEALS_NBYTES:] = (head + digest(head)) * 2
    where.write_bytes(data)


def slot_tail(chance: random.Random, path: pathlib.Path) -> None:
    (where,) = chance.sample(sorted(path.rglob("*.slot")), 1)
    data = bytearray(where.read_bytes())
    _, sequence, seal = decode_seals(bytes(data[-SEALS_NBYTES:]))
    what = chance.choice(["layout", "leaves"])
    part = seal.tail[what]
    raw = msgspec.msgpack.decode(bytes(data[part.offset : part.offset + part.nbytes]))
    before = msgspec.msgpack.encode(raw)
    body = to_msgpack(mutated(chance, raw))
    body = body if len(body) <= part.nbytes else torn(chance, before)[: part.nbytes]
    data[part.offset : part.offset + len(body)] = body
    said = {f"{what}_nbytes": len(body), f"{what}_digest": digest(body)}
    data[-SEALS_NBYTES:] = encode_seal(msgspec.structs.replace(seal, **said), sequence + 1) * 2
    where.write_bytes(data)


def parity_seal(chance: random.Random, path: pathlib.Path) -> None:
    found = sorted(path.rglob("*.parity"))
    where = chance.choice(found)
    data = bytearray(where.read_bytes())
    from ckptd.parity.record import decode_seals as parity_seals  # noqa: PLC0415

    _, sequence, seal = parity_seals(bytes(data[-SEALS_NBYTES:]))
    if chance.random() < 0.5 and isinstance(seal, ParitySeal):
        record = data[seal.record_offset : seal.record_offset + seal.record_nbytes]
        body = to_msgpack(mutated(chance, msgspec.msgpack.decode(bytes(record))))[: seal.record_nbytes]
        data[seal.record_offset : seal.record_offset + len(body)] = body
        seal = msgspec.structs.replace(seal, record_nbytes=len(body), record_digest=digest(body))
        body = msgspec.msgpack.encode(seal)
    else:
        body = to_msgpack(mutated(chance, forge.plain(seal)))[:4060]
    head = (b"CKPTDPY2" + (sequence + 1).to_bytes(8, "little") + len(body).to_bytes(4, "little") + body).ljust(
        4080, b"\0"
    )
    data[-SEALS_NBYTES:] = (head + digest(head)) * 2
    where.write_bytes(data)


def topology(chance: random.Random, path: pathlib.Path) -> None:
    (where,) = path.rglob(arena_paths.TOPOLOGY)
    record = msgspec.msgpack.decode(where.read_bytes())
    if chance.random() < 0.5:
        where.write_bytes(to_msgpack(mutated(chance, record)))
        return
    _, keys, rest = record[2]  # with the digest of what was changed
    plain = to_msgpack(mutated(chance, msgspec.msgpack.decode(zlib.decompress(rest))))
    record[2] = [columns.digest_of(keys, plain), keys, zlib.compress(plain)]
    where.write_bytes(to_msgpack(record))


def rank(chance: random.Random, path: pathlib.Path) -> None:
    (where,) = path.rglob("*.rank")
    where.write_bytes(to_json(mutated(chance, json.loads(where.read_bytes()))))


def dcp_metadata(chance: random.Random, path: pathlib.Path) -> None:
    where = path / STOCK_METADATA
    if chance.random() < 0.5:
        where.write_bytes(pickled(chance, where.read_bytes()))
        return
    found = pickle.loads(where.read_bytes())  # noqa: S301 - our own
    for _ in range(chance.choice([1, 2])):
        chosen: Any = chance.choice([*found.storage_data.values(), *found.state_dict_metadata.values()])
        fields = [name for name in vars(chosen) if not name.startswith("__")] if hasattr(chosen, "__dict__") else []
        if fields:
            name = chance.choice(fields)
            with_what = getattr(chosen, name)
            object.__setattr__(
                chosen, name, edgy(chance, with_what if isinstance(with_what, (int, str, list)) else None)
            )
    where.write_bytes(pickle.dumps(found, chance.choice([2, 4])))


def dcp_archive(chance: random.Random, path: pathlib.Path) -> None:
    """What one name's archive holds, its directory made right."""
    found = pickle.loads((path / STOCK_METADATA).read_bytes())  # noqa: S301 - our own
    index = chance.choice(sorted(found.storage_data, key=str))
    info = found.storage_data[index]
    data = (path / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
    new = zipped(chance, data)
    (path / "new").write_bytes(new)
    info.relative_path, info.offset, info.length = "new", 0, len(new)
    (path / STOCK_METADATA).write_bytes(pickle.dumps(found))


def zipped(chance: random.Random, data: bytes) -> bytes:
    """A torch.save archive with another pickle, compressed, or torn."""
    how = chance.random()
    if how < 0.3:
        return torn(chance, data)
    out = io.BytesIO()
    kind = zipfile.ZIP_DEFLATED if how < 0.4 else zipfile.ZIP_STORED
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", kind) as new, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for info in old.infolist():
            content = old.read(info)
            if chance.random() < (0.9 if info.filename.endswith("data.pkl") else 0.1):
                content = pickled(chance, content)
            for _ in range(chance.choice([1] * 15 + [0, 2])):
                new.writestr(info.filename, content)
    return out.getvalue()


def zero_archive(chance: random.Random, path: pathlib.Path) -> None:
    where = chance.choice(sorted(path.rglob("*.pt")))
    where.write_bytes(zipped(chance, where.read_bytes()))


def plain_header(chance: random.Random, path: pathlib.Path) -> None:
    where = path / chance.choice(["1.safetensors", "2.safetensors"])
    data = where.read_bytes()
    nbytes = int.from_bytes(data[:8], "little")
    text = to_json(mutated(chance, json.loads(data[8 : 8 + nbytes])))
    where.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + nbytes :])


def index(chance: random.Random, path: pathlib.Path) -> None:
    (path / INDEX).write_bytes(to_json(mutated(chance, json.loads((path / INDEX).read_bytes()))))


def publication(chance: random.Random, path: pathlib.Path) -> None:
    """What a checkpoint says of a trainer's files, which is no order."""
    root = path.parents[2]
    said = TrainerFiles(
        save_id=SAVE.text, files={"a/b": forge.RANK0, "c": forge.RANK0}, saved_for=SavedFor(str(root / "out"), True)
    )
    data = to_json(mutated(chance, forge.plain(said)))
    if chance.random() < 0.7:
        forge.put_stock(path, STOCK_FILES, data)
    else:
        (path / STOCK_FILES).write_bytes(data)
    (path / UNPUBLISHED).touch()
    if chance.random() < 0.5:
        (path / LINKED).mkdir()
        for number, directory in enumerate((str(root / "out"), "/nonexistent")):
            (path / LINKED / str(number)).write_bytes(to_json(mutated(chance, {"directory": directory})))
    if chance.random() < 0.3:
        (root / "out").mkdir()
        origin = {"path": str(path), "job": "demo", "save_id": SAVE.text, "step": 10}
        (root / "out" / MARKER).write_bytes(to_json(mutated(chance, origin)))


def record(chance: random.Random, path: pathlib.Path) -> None:
    """An incarnation's."""
    where = path.parent / INCARNATIONS_DIR / "i00000003"
    said = {"incarnation": 3, "run": SAVE.run.hex(), "session": "session", "node": "node"}
    text = to_json(mutated(chance, said))
    where.write_bytes(text if chance.random() < 0.8 else torn(chance, text))


def journal(chance: random.Random, path: pathlib.Path) -> None:
    """A segment with records made right, of what they say or of what they are."""
    bodies = [msgspec.msgpack.decode(msgspec.msgpack.encode(entry)) for entry in test_journal.ALL]
    bodies = [to_msgpack(mutated(chance, body) if chance.random() < 0.3 else body) for body in bodies]
    frames = [struct.pack("<IQ", len(body), xxhash.xxh3_64_intdigest(body)) + body for body in bodies]
    segment = journals.segment(frames)
    name = journals.Name(3, journals.run_digits(RUN), "0" * 8, chance.randrange(3))
    (path / journals.JOURNAL_DIR).mkdir()
    (path / name.path).write_bytes(segment if chance.random() < 0.7 else torn(chance, segment))


def encoded(examples: Callable[[], list[bytes]], chance: random.Random, path: pathlib.Path) -> None:
    raw = chance.choice(examples())
    if chance.random() < 0.7:
        raw = to_msgpack(mutated(chance, msgspec.msgpack.decode(raw)))
    (path / "file").write_bytes(raw if chance.random() < 0.8 else torn(chance, raw))


def of_ranks(name: str) -> list[bytes]:
    return [messages.encode(one) for one in getattr(test_messages, name)]


def of_wire(name: str) -> list[bytes]:
    return [wire.WIRES[name].encode(one) for one in wire.examples(wire.WIRES[name]).values()]


def surveys() -> list[bytes]:
    return [msgspec.msgpack.encode({"report": {"node": "n", "version": "1", "problems": []}, "job": None})]


def store_file(chance: random.Random, path: pathlib.Path) -> None:
    text = to_json(mutated(chance, {"format": 1, "store_id": STORE_ID}))
    (path / "file").write_bytes(text if chance.random() < 0.7 else torn(chance, text))


def statuses(chance: random.Random, path: pathlib.Path) -> None:
    from tests.unit import a_status  # noqa: PLC0415

    made = [value for value in vars(a_status).values() if isinstance(value, msgspec.Struct)]
    raw = json.loads(msgspec.json.encode(chance.choice(made))) if made else {"schema": 1, "jobs": []}
    (path / "file").write_bytes(to_json(mutated(chance, raw)))


def toml(chance: random.Random, path: pathlib.Path) -> None:
    lines = ['store = "/pfs"', "keep_last = 3", 'budget_nbytes = "64M"', "drain_parity = true", "stop_drain_s = 3.5"]
    made = [f"{line.split('=')[0]}= {to_json(edgy(chance)).decode('utf-8', 'replace')[:2000]}" for line in lines]
    text = "\n".join(chance.choice(pair) for pair in zip(lines, made, strict=True)).encode()
    (path / "file").write_bytes(text if chance.random() < 0.6 else torn(chance, text))


def keys(chance: random.Random, path: pathlib.Path) -> None:
    pair = make_keys()
    text = f'public = "{pair.public}"\nsecret = "{pair.secret}"\n'.encode()
    (path / "file").write_bytes(torn(chance, text))
    (path / "file").chmod(0o600)


def identity(chance: random.Random, path: pathlib.Path) -> None:
    pair = make_keys()
    raw = {"arena": "abc", "keys": {"public": pair.public, "secret": pair.secret}, "port": 4000}
    (path / "file").write_bytes(to_msgpack(mutated(chance, raw)))


CHECKPOINT, UNFINISHED, PARITY = mutant_readers.CHECKPOINT, mutant_readers.UNFINISHED, mutant_readers.PARITY
ARENA, DCP, SAFETENSORS, ZERO = (getattr(mutant_readers, name) for name in ("ARENA", "DCP", "SAFETENSORS", "ZERO"))
KINDS: dict[str, Kind] = {
    "manifest": Kind("final", manifest, CHECKPOINT),
    "manifest of parts": Kind("boxes", manifest, mutant_readers.BOXES),
    "COMMITTED": Kind("final", committed, CHECKPOINT),
    "index of records": Kind("ranks", record_index, mutant_readers.RANKS),
    "any file of ranks": Kind("ranks", any_file, mutant_readers.RANKS),
    "layout": Kind("final", layout, CHECKPOINT),
    "layout of parts": Kind("boxes", layout, mutant_readers.BOXES),
    "leaves": Kind("final", leaves, CHECKPOINT),
    "image's header": Kind("final", header, CHECKPOINT),
    "vote": Kind("final", vote, CHECKPOINT),
    ".metadata of ckptd": Kind("final", partial(stock, STOCK_METADATA), CHECKPOINT),
    "objects.pt": Kind("final", partial(stock, "objects.pt"), CHECKPOINT),
    "files.json": Kind("final", publication, CHECKPOINT),
    "incarnation's record": Kind("final", record, CHECKPOINT),
    "any file": Kind("final", any_file, CHECKPOINT),
    "names": Kind("final", names, CHECKPOINT),
    "vote of an unfinished one": Kind("partial", vote, UNFINISHED),
    "any file of an unfinished one": Kind("partial", any_file, UNFINISHED),
    "parity in a vote": Kind("parity", parity_vote, PARITY),
    "parity's record": Kind("parity", parity_record, PARITY),
    "any file with parity": Kind("parity", any_file, PARITY),
    "seal": Kind("arena", slot_seal, ARENA),
    "slot's tail": Kind("arena", slot_tail, ARENA),
    "parity's seal": Kind("arena", parity_seal, ARENA),
    "topology": Kind("arena", topology, ARENA),
    "rank file": Kind("arena", rank, ARENA),
    "any file of an arena": Kind("arena", any_file, ARENA),
    ".metadata of DCP": Kind("dcp", dcp_metadata, DCP),
    "archive of DCP": Kind("dcp", dcp_archive, DCP),
    "any file of DCP": Kind("dcp", any_file, DCP),
    "header of safetensors": Kind("safetensors", plain_header, SAFETENSORS),
    "index of safetensors": Kind("safetensors", index, SAFETENSORS),
    "any file of safetensors": Kind("safetensors", any_file, SAFETENSORS),
    **{f"archive of ZeRO, {stage}": Kind(stage, zero_archive, ZERO) for stage in STAGES},
    "any file of ZeRO": Kind("stage2", any_file, ZERO),
    "config": Kind("file", toml, mutant_readers.CONFIG),
    "journal": Kind("file", journal, mutant_readers.JOURNAL),
    "keys": Kind("file", keys, mutant_readers.KEYS),
    "identity": Kind("file", identity, mutant_readers.IDENTITY),
    "status": Kind("file", statuses, mutant_readers.MESSAGES["status"]),
    "store's id": Kind("file", store_file, mutant_readers.STORE),
    "survey": Kind("file", partial(encoded, surveys), mutant_readers.MESSAGES["survey"]),
    **{
        name: Kind("file", partial(encoded, partial(of_ranks, name)), mutant_readers.MESSAGES[name])
        for name in ("REQUESTS", "REPLIES")
    },
    **{
        name: Kind("file", partial(encoded, partial(of_wire, name)), mutant_readers.of_wire(name, one.decode))
        for name, one in wire.WIRES.items()
        if name != "store_hello"
    },
}  # fmt: skip
