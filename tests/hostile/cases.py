"""Malformed checkpoints by name: what is done to a sound one, and which readers must refuse it.

Every one is forged so that all digests match, unless its name says "unsigned". Readers that are not told to refuse may
succeed, since what is wrong is not their business, but must not crash, hang, or run anything.
"""

import os
import pickle
import struct
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import msgspec

from ckptd.shared.format import layout as lay
from ckptd.shared.format.columns import squeezed
from ckptd.shared.format.manifest import COMMITTED, STOCK_METADATA, STOCK_OBJECTS
from tests.hostile import forge
from tests.hostile.forge import RANK0
from tests.runs import MANIFEST, VOTES, file_in, manifest_in, vote_in

LOAD, VERIFY, LIST, EXPORT, REBUILD = "load", "verify", "list", "export", "rebuild"
ALL = frozenset({LOAD, VERIFY, LIST, EXPORT, REBUILD})
BOTH = frozenset({LOAD, VERIFY, EXPORT})
RECORDS = BOTH | {REBUILD}  # who opens the manifest
DEEP = b"\x81\xa1x" + b"\x91" * 200_000 + b"\x01"  # a map with one key that nobody knows, nested
MARKER = "MARKER_OF_TESTS"


class Case(NamedTuple):
    """What to do to the directory, who must refuse it, and the file that each refusal names."""

    make: Callable[[Path], None]
    by: frozenset[str]
    file: str


CASES: dict[str, Case] = {}


def case(name: str, by: frozenset[str], file: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    def keep(make: Callable[[Path], None]) -> Callable[[Path], None]:
        assert name not in CASES, name
        CASES[name] = Case(make, by, file)
        return make

    return keep


def add(name: str, by: frozenset[str], file: str, make: Callable[[Path], None]) -> None:
    case(name, by, file)(make)


class Bomb:
    """A pickle that makes a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f'touch "${MARKER}"',)


# --- the header of an image: what stock readers believe. load goes by the layout, so only verify must object.


def tensor(change: Callable[[Any], None], name: str = "model.weight") -> Callable[[Path], None]:
    return lambda final: forge.edit_header(final, lambda header: change(header[name]))


def header(name: str, make: Callable[[Path], None]) -> None:
    add(f"header {name}", frozenset({VERIFY}), RANK0, make)


def text(data: bytes, **settings: int) -> Callable[[Path], None]:
    return lambda final: forge.put_header(final, data, **settings)


header("no JSON", text(b"{"))
header("NULs", text(bytes(100)))
header("no UTF-8", text(b'{"\xff":1}'))
header("a list", text(b"[]"))
header("empty", text(b"{}"))
header("deep", text(b'{"__metadata__":' + b"[" * 3000))
header("huge number", text(b'{"a":' + b"9" * 3000 + b"}"))
header("length 0", text(b"{}", length=0))
header("length huge", text(b"{}", length=(1 << 64) - 1))
header("length beyond the file", text(b"{}", length=1 << 20))
header("offsets negative", tensor(lambda t: t.update(data_offsets=[-8, t["data_offsets"][1]])))
header("offsets reversed", tensor(lambda t: t.update(data_offsets=t["data_offsets"][::-1])))
header("offsets beyond the file", tensor(lambda t: t.update(data_offsets=[n + (1 << 40) for n in t["data_offsets"]])))
header("offsets overlap", tensor(lambda t: t.update(data_offsets=[n - 4 for n in t["data_offsets"]])))
header("offsets huge", tensor(lambda t: t.update(data_offsets=[0, 1 << 63])))
header("offsets of floats", tensor(lambda t: t.update(data_offsets=[float(n) for n in t["data_offsets"]])))
header("offsets of bools", tensor(lambda t: t.update(data_offsets=[False, True])))
header("offsets three", tensor(lambda t: t["data_offsets"].append(5)))
header("dtype unknown", tensor(lambda t: t.update(dtype="F7")))
header("dtype other", tensor(lambda t: t.update(dtype="F64")))
header("dtype none", tensor(lambda t: t.pop("dtype")))
header("shape other", tensor(lambda t: t.update(shape=[1, 1])))
header("shape negative", tensor(lambda t: t.update(shape=[-4, -3])))
header("shape overflows", tensor(lambda t: t.update(shape=[1 << 33, 1 << 33, 3])))
header("shape deep", tensor(lambda t: t.update(shape=[[4], 3])))
header("tensor missing", lambda final: forge.edit_header(final, lambda h: h.pop("model.weight")))
header("metadata of numbers", lambda final: forge.edit_header(final, lambda h: h["__metadata__"].update(format=1)))
header("metadata no map", lambda final: forge.edit_header(final, lambda h: h.update(__metadata__=[])))
header(
    "of another save",
    lambda final: forge.edit_header(
        final, lambda h: h["__metadata__"].update({"ckptd.save_id": "00000001-0000000009-000000000009"})
    ),
)
header(
    "sharding of elsewhere",
    lambda final: forge.edit_header(final, lambda h: h["__metadata__"].update(DCP_SHARDING_INFO='{"model.weight":{}}')),
)


@case("header tensor twice", frozenset({VERIFY}), RANK0)
def _(final: Path) -> None:
    whole = msgspec.json.encode(forge.header_of(final))
    again = msgspec.json.encode(forge.header_of(final)["model.weight"])
    forge.put_header(final, whole[:-1] + b',"model.weight":' + again + b"}")


# --- the layout: what our own reader believes


def layout(name: str, change: Callable[[Any], None]) -> None:
    add(f"layout {name}", BOTH, RANK0, lambda final: forge.edit_layout(final, change))


def shape_of(name: str, change: Callable[[Any], None]) -> None:
    """No layout is wrong by itself that calls a box a part of something larger: load finds that it is not whole."""
    add(f"layout {name}", frozenset({LOAD}), "step-000000010", lambda final: forge.edit_layout(final, change))


def entry(index: int, value: Any) -> Callable[[Any], None]:
    """A field of the first tensor's entry: name, dtype, global shape, offsets, sizes, offset, nbytes, slice's two."""
    return lambda raw: raw["tensors"][0].__setitem__(index, value)


def fields(**values: Any) -> Callable[[Any], None]:
    return lambda raw: raw.update(values)


layout("version", fields(version=1))
layout("of another rank", fields(rank=1))
layout("of another world", fields(world_size=7))
layout("image huge", fields(image_nbytes=1 << 60))
layout("image short", fields(image_nbytes=4096))
layout("header huge", fields(header_nbytes=1 << 60))
layout("header negative", fields(header_nbytes=-1))
layout("header none", fields(header_nbytes=0))
layout("no tensors", fields(tensors=[]))
layout("tensor twice", lambda raw: raw["tensors"].append(raw["tensors"][0]))
layout("dtype unknown", entry(1, "F7"))
layout("dtype text huge", entry(1, "F" * 100_000))
shape_of("shape huge", entry(2, [1 << 40, 1 << 20]))
layout("shape of no elements huge", entry(2, [0, 1 << 61]))
layout("dims many", entry(2, [1] * 65))
layout("dims differ", entry(3, [0]))
layout("offset huge", entry(3, [1 << 61, 0]))
layout("sizes negative", entry(4, [-4, -3]))
layout("sizes overflow", entry(4, [1 << 61, 1 << 61]))
layout("data before the file", entry(5, -8))
layout("data over the header", lambda raw: raw["tensors"][0].__setitem__(slice(5, None), [0, 48]))
layout("data beyond the file", lambda raw: raw["tensors"][0].__setitem__(slice(5, None), [1 << 40, 48]))
layout("data over another tensor", lambda raw: raw["tensors"][0].__setitem__(slice(5, 9), raw["tensors"][1][5:9]))
layout("archive beyond the file", entry(8, 1 << 40))
layout("alias of nothing", fields(aliases={"model.tied": "model.nothing"}))
layout("alias of itself", fields(aliases={"model.tied": "model.tied"}))
layout("alias of a tensor's name", fields(aliases={"model.bias": "model.weight"}))
layout("path empty", lambda raw: raw["paths"].update({"epoch": []}))
layout("path elsewhere", lambda raw: raw["paths"].update({"epoch": [["k", "optimizer"]]}))
layout("path long", lambda raw: raw["paths"].update({".".join("a" * 500): [["k", "a"]] * 500}))
layout("path of bad kinds", lambda raw: raw["paths"].update({"epoch": [["l", "epoch"]]}))
layout("path of a huge number", lambda raw: raw["paths"].update({str(1 << 63): [["i", 1 << 63]]}))
layout("path negative", lambda raw: raw["paths"].update({"pair.-1": [["k", "pair"], ["l", -1]]}))
layout("path none", lambda raw: raw["paths"].pop("model.weight"))
shape_of("all of a huge tensor in two rows", lambda raw: raw["tensors"].__setitem__(
    0, ["model.weight", "F32", [1 << 50, 3], [0, 0], [4, 3], *raw["tensors"][0][5:]]))  # fmt: skip
shape_of("huge tensor of an optimizer", lambda raw: next(
    t for t in raw["tensors"] if t[0].startswith("optimizer.") and len(t[2]) == 2).__setitem__(2, [1 << 40, 3])
)  # fmt: skip


def unpacked(name: str, change: Callable[[Any], None]) -> None:
    """Of the parts, each box with its sizes and offsets: what no layout in terms of tensors can say."""

    def make(final: Path) -> None:
        raw = forge.opened(forge.packed(forge.plain_layout(final)))
        change(raw)
        forge.put_layout(final, forge.closed(raw))

    add(f"layout's {name}", BOTH, RANK0, make)


TENSOR, IS_PLACED, SIZES, GAP, HEAD, TAIL, PLACEMENT, OFFSETS = range(8)


def number(which: int, value: Any, at: int = 0) -> Callable[[Any], None]:
    return lambda raw: raw["columns"][which].__setitem__(at, value)


def placed(cuts: list[int], *, mesh: int = 0, shape: Any = (2, 2), place: Any = (0, 1)) -> Callable[[Any], None]:
    """The first box as one that lies on a mesh."""

    def change(raw: Any) -> None:
        raw["form"] |= {"meshes": [shape], "placements": [[mesh, cuts]]}
        raw["own"]["places"] = [place]
        dims = len(raw["plan"]["tensors"][0][2])
        raw["columns"][IS_PLACED] = [1, *[0] * (raw["form"]["count"] - 1)]
        raw["columns"][PLACEMENT] = [1] * len(raw["plan"]["tensors"])
        raw["columns"][SIZES], raw["columns"][OFFSETS] = raw["columns"][SIZES][dims:], raw["columns"][OFFSETS][dims:]

    return change


for _part in ("plan", "form", "own"):
    unpacked(f"{_part} of another version", lambda raw, part=_part: raw[part].update(version=1))
    unpacked(f"{_part} no map", lambda raw, part=_part: raw.__setitem__(part, [1]))
unpacked("tensor none", number(TENSOR, 2_000_000))
unpacked("tensor before all", number(TENSOR, 1))
unpacked("placement none", number(PLACEMENT, 7))
unpacked("placement of a tensor that has none", number(IS_PLACED, 1))
unpacked("size beyond 2^62", number(SIZES, 1 << 62))
unpacked("gap beyond the file", number(GAP, 1 << 60))
unpacked("gap before the file", number(GAP, (1 << 60) + 1))
unpacked("head before the file", number(HEAD, 1 << 60))
unpacked("columns few", lambda raw: raw["columns"].pop(0))
unpacked("column short", lambda raw: raw["columns"][GAP].pop())
unpacked("column no numbers", lambda raw: raw["columns"].__setitem__(GAP, "text"))
unpacked("column of a width that is none", lambda raw: raw["columns"].__setitem__(GAP, b"\x03abc"))
unpacked("sizes many", lambda raw: raw["columns"][SIZES].append(1))
unpacked("offsets few", lambda raw: raw["columns"][OFFSETS].pop())
unpacked("boxes huge", lambda raw: raw["form"].update(count=9_999_999))
unpacked("boxes beyond all", lambda raw: raw["form"].update(count=1 << 40))
unpacked("mesh none", placed([0, -1], mesh=3))
unpacked("mesh of no extent", placed([0, -1], shape=(0, 2)))
unpacked("place outside", placed([0, -1], place=(2, 0)))
unpacked("place of other dimensions", placed([0, -1], place=(0,)))
unpacked("cut of no dimension", placed([9, -1]))
unpacked("cut of -2", placed([-2, -1]))
unpacked("cuts few", placed([0]))
for _name, _body in {
    "deep": DEEP,
    "counts huge": b"\x81\xa7tensors\xdd\xff\xff\xff\xff",
    "map huge": b"\xdf\xff\xff\xff\xff",
    "text huge": b"\x81\xa4file\xdb\xff\xff\xff\xff",
    "nothing": b"",
    "no msgpack": b"\xc1" * 50,
}.items():
    for _part in ("plan", "form", "own"):
        put = partial(forge.put_part, part=_part, body=_body)
        add(f"layout's {_part} {_name}", BOTH, RANK0, put)
        if _part != "own":
            body = zlib.compress(_body)
            add(f"layout's {_part} {_name}, deflated", BOTH, RANK0, partial(forge.put_part, part=_part, body=body))
            if _part == "plan":
                body = squeezed([_body])
                add(f"layout's plan {_name}, in its place", BOTH, RANK0, partial(forge.put_part, part=_part, body=body))
add("layout's plan a bomb", BOTH, RANK0, lambda final: forge.put_part(final, "plan", forge.zeros_in_zlib(1 << 28)))
add("layout's form a bomb", BOTH, RANK0, lambda final: forge.put_part(final, "form", forge.zeros_in_zlib(1 << 28)))
add("layout's plan cut", BOTH, RANK0, lambda final: forge.edit_record(
    final, 0, lambda record: record.update(plan=record["plan"][:-1])))  # fmt: skip
add("layout's plan and more", BOTH, RANK0, lambda final: forge.edit_record(
    final, 0, lambda record: record.update(plan=record["plan"] + b"x")))  # fmt: skip
vote_of_parts = {
    "no plan": {"plan": 99},
    "no form": {"form": 99},
    "plan of -1": {"plan": -1},
    "own no bytes": {"own": []},
}


# --- plain leaves. verify checks that they can be taken apart, not what each says


def leaf(name: str, data: bytes, codec: str = "safe/1") -> None:
    def make(final: Path) -> None:
        leaves = lay.decode_leaves(forge.records_of(final)[0].leaves, where="forge")
        forge.put_leaves(
            final, lay.encode_leaves(lay.Leaves(lay.VERSION, leaves.leaves | {"epoch": lay.Leaf(codec, data)}))
        )

    add(f"leaf {name}", frozenset({LOAD}), "state['epoch']", make)


def ext(code: int, body: Any) -> bytes:
    return msgpack.packb(msgpack.ExtType(code, msgpack.packb(body)))


leaf("pickle", pickle.dumps(Bomb()), "pickle")
leaf("pickle as safe", pickle.dumps(Bomb()))
leaf("codec unknown", b"", "x" * 100_000)
leaf("deep", b"\x91" * 100_000 + b"\x01")
leaf("array huge", b"\xdd\xff\xff\xff\xff")
leaf("tensor huge", ext(35, ["float32", [1 << 40, 1 << 40], b""]))
leaf("array of objects", ext(37, ["|O", [1], bytes(8)]))
leaf("class of the library", ext(17, ["os:system", {}]))
leaf("deque negative", ext(10, [-1, []]))
leaf("nothing", b"")
for _name, _body in {
    "deep": DEEP,
    "counts huge": b"\x92\x01\xdf\xff\xff\xff\xff",
    "nothing": b"",
    "version": b"\x92\x01\x80",
}.items():
    add(f"leaves {_name}", BOTH, RANK0, lambda final, body=_body: forge.put_leaves(final, body))


# --- the manifest


def manifest(name: str, change: Callable[[Any], None]) -> None:
    add(f"manifest {name}", RECORDS, MANIFEST, lambda final: forge.edit_manifest(final, change))


def vote(name: str, change: Callable[[Any], None]) -> None:
    add(f"vote {name}", RECORDS, VOTES[0], lambda final: forge.edit_vote(final, 0, change))


def record(title: str, **values: Any) -> None:
    vote(title, lambda raw: raw["files"][0].update(values))


def ref(field: int, value: Any) -> Callable[[Any], None]:
    """A field of the first vote's entry: node, set, bytes, digest, runs of ranks."""
    return lambda raw: raw["votes"][0].__setitem__(field, value)


manifest("version", fields(version=1))
manifest("other digests", fields(digest_kind="md5"))
manifest("of another job", fields(job="else"))
manifest("job outside", fields(job="../.."))
manifest("of another save", fields(save=[1, 9, 9]))
manifest("save negative", fields(save=[-1, 0, 0]))
manifest("save huge", fields(save=[1, 1, 1 << 63]))
manifest("no ranks", fields(world_size=0, votes=[]))
manifest("ranks huge", fields(world_size=1 << 20))
manifest("no votes", fields(votes=[]))
manifest("files negative", fields(files=-1))
manifest("bytes huge", fields(nbytes=1 << 63))
manifest("ranks of nobody", ref(4, []))
manifest("ranks twice", ref(4, [0, 1, 0, 1]))
manifest("ranks backwards", ref(4, [1, 0]))
manifest("ranks without an end", ref(4, [0]))
manifest("ranks beyond the job", ref(4, [0, 1 << 20]))
manifest("a vote of no set", ref(1, 7))
manifest("a set outside", fields(folders=["../.."]))
manifest("sets twice", lambda raw: raw["folders"].append(raw["folders"][0]))
vote("version", fields(version=1))
vote("of another job", fields(job="else"))
vote("of another save", fields(save=[1, 9, 9, bytes(16)]))
vote("of another node", fields(node="else"))
vote("of another world", fields(world_size=7))
vote("of another set", fields(folder="e00000009-01234567"))
vote("of another store", fields(store_id="f" * 32))
vote("no files", fields(files=[]))
vote("rank twice", lambda raw: raw["files"].append(raw["files"][0]))
for _name, _bad in {
    "outside": f"../{RANK0}", "absolute": "/etc/passwd", "with NUL": f"{RANK0}\0", "with newline": f"{RANK0}\n",
    "hidden": f".{RANK0}", "of another rank": "r00001-p00.safetensors", "empty": "",
    "of a manifest": f"ckptd.{0:016x}.manifest",
}.items():  # fmt: skip
    record(f"file {_name}", name=_bad)
    manifest(f"vote {_name}", ref(0, f"../{_bad}"))
    manifest(f"stock {_name}", lambda raw, bad=_bad: raw["stock"][0].update(name=f"../{bad}"))
record("file of rank -1", rank=-1)
record("file negative", nbytes=-1)
record("file huge", nbytes=1 << 61)
record("digests short", digests=b"")
record("digests long", digests=bytes(32))
for _name, _said in vote_of_parts.items():
    record(_name, **_said)
for _name, _body in {
    "deep": DEEP,
    "counts huge": b"\x81\xa5files\xdd\xff\xff\xff\xff",
    "map huge": b"\xdf\xff\xff\xff\xff",
    "nothing": b"",
    "no map": b"\x01",
}.items():
    add(f"manifest {_name}", RECORDS, MANIFEST, lambda final, body=_body: forge.put_manifest(final, body))


@case("manifest of a file that is larger than it says", BOTH, RANK0)
def _(final: Path) -> None:
    """A terabyte that is not there, claimed by a table of digests of a megabyte."""
    nbytes = 1 << 40
    count = nbytes // (16 << 20)

    def claim(raw: Any) -> None:
        raw["image_nbytes"] = nbytes
        size = nbytes - raw["header_nbytes"]
        first = ["model.weight", "U8", [size], [0], [size], raw["header_nbytes"], size]
        raw["tensors"], raw["aliases"] = [first], {}
        raw["paths"] = {"model.weight": [["k", "model"], ["k", "weight"]]}

    forge.edit_layout(final, claim)
    forge.edit_record(final, 0, lambda raw: raw.update(nbytes=nbytes, digests=bytes(16 * count)))


# --- COMMITTED


def committed(name: str, change: Callable[[Any], None], by: frozenset[str] = ALL) -> None:
    add(f"committed {name}", by, COMMITTED, lambda final: forge.edit_committed(final, change))


committed("format", fields(format=1))
committed("job outside", fields(job="../demo"))
committed("of another save", fields(save_id="00000001-0000000009-000000000009", counter=9))
committed("step negative", fields(step=-10))
committed("step huge", fields(step=10**4000))
committed("counter huge", fields(counter=1 << 70))
committed("counter text", fields(counter="1"))
committed("world huge", fields(world_size=1 << 70))
committed("bytes negative", fields(nbytes=-1))
committed("bytes huge", fields(nbytes=1 << 100))
committed("files negative", fields(files=-1))
committed("manifest negative", fields(manifest_nbytes=-1))
committed("digest other", fields(manifest_digest="0" * 32), by=RECORDS)
for _name, _body in {
    "no JSON": b"{",
    "nothing": b"",
    "NULs": bytes(4096),
    "no UTF-8": b'{"\xff": 1}',
    "deep": b'{"x":' + b"[" * 60_000,
    "large": b" " * (1 << 20),
    "a list": b"[]",
}.items():
    add(
        f"committed {_name}",
        ALL,
        COMMITTED,
        lambda final, body=_body: (final / COMMITTED).write_bytes(body) and None,
    )


# --- what is no regular file

for _what in ("fifo", "directory", "device", "nowhere", "loop", "outside"):
    add(f"{_what} as COMMITTED", ALL, COMMITTED, lambda final, w=_what: forge.instead(final / COMMITTED, w))
    add(f"{_what} as manifest", ALL, MANIFEST, lambda final, w=_what: forge.instead(manifest_in(final), w))
    add(f"{_what} as image", BOTH, RANK0, lambda final, w=_what: forge.instead(final / RANK0, w))
    add(f"{_what} as vote", RECORDS, VOTES[0], lambda final, w=_what: forge.instead(vote_in(final), w))
    for _stock in (STOCK_METADATA, STOCK_OBJECTS):
        add(
            f"{_what} as {_stock}", frozenset({VERIFY}), _stock,
            lambda final, w=_what, name=_stock: forge.instead(final / name, w),
        )  # fmt: skip


@case("votes outside", frozenset({VERIFY}), "sets")
def _(final: Path) -> None:
    outside = final.parents[1].parent / f"sets-{os.urandom(4).hex()}"
    (final / "sets").rename(outside)
    (final / "sets").symlink_to(outside)


_BY = {COMMITTED: ALL, MANIFEST: ALL, VOTES[0]: RECORDS, RANK0: BOTH}
for _name in (COMMITTED, MANIFEST, STOCK_METADATA, STOCK_OBJECTS, VOTES[0], RANK0):
    add(  # a hole, so that it costs no disk: nobody may read it into memory
        f"unsigned {_name} of a terabyte",
        _BY.get(_name, frozenset({VERIFY})),
        _name,
        lambda final, name=_name: os.truncate(file_in(final, name), 1 << 40),
    )
    add(
        f"unsigned {_name} missing",
        _BY.get(_name, frozenset({VERIFY})),
        _name,
        lambda final, name=_name: os.unlink(file_in(final, name)),
    )


# --- what is there for stock readers


def zip_bomb() -> bytes:
    """An archive whose one record swells to a gibibyte."""
    name, crc, nbytes = b"a/data.pkl", 0, 1 << 30
    data = forge.deflated_zeros(nbytes)
    local = struct.pack("<IHHHHHIIIHH", 0x04034B50, 20, 0, 8, 0, 0, crc, len(data), nbytes, len(name), 0) + name + data
    central = struct.pack(
        "<IHHHHHHIIIHHHHHII", 0x02014B50, 20, 20, 0, 8, 0, 0, crc, len(data), nbytes, len(name), 0, 0, 0, 0, 0, 0
    )
    end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 1, 1, len(central + name), len(local), 0)
    return local + central + name + end


add("metadata with a bomb", frozenset({VERIFY}), STOCK_METADATA,
    lambda final: forge.put_stock(final, STOCK_METADATA, pickle.dumps(Bomb(), 2)))  # fmt: skip
add("metadata with a bomb of protocol 5", frozenset({VERIFY}), STOCK_METADATA,
    lambda final: forge.put_stock(final, STOCK_METADATA, pickle.dumps(Bomb(), 5)))  # fmt: skip
add("metadata of nothing", frozenset({VERIFY}), STOCK_METADATA,
    lambda final: forge.put_stock(final, STOCK_METADATA, b""))  # fmt: skip
add("metadata with more behind its end", frozenset({VERIFY}), STOCK_METADATA, lambda final: forge.put_stock(
    final, STOCK_METADATA, (final / STOCK_METADATA).read_bytes() + pickle.dumps(Bomb(), 2)))  # fmt: skip
add("objects with a bomb", frozenset(), STOCK_OBJECTS,
    lambda final: forge.put_stock(final, STOCK_OBJECTS, pickle.dumps(Bomb())))  # fmt: skip
add("objects with a zip bomb", frozenset(), STOCK_OBJECTS,
    lambda final: forge.put_stock(final, STOCK_OBJECTS, zip_bomb()))  # fmt: skip
add("unsigned metadata with a bomb", frozenset({VERIFY}), STOCK_METADATA,
    lambda final: (final / STOCK_METADATA).write_bytes(pickle.dumps(Bomb(), 2)) and None)  # fmt: skip
add("unsigned objects with a bomb", frozenset({VERIFY}), STOCK_OBJECTS,
    lambda final: (final / STOCK_OBJECTS).write_bytes(pickle.dumps(Bomb())) and None)  # fmt: skip
