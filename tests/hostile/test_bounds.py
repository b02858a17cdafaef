"""Small files that once took gigabytes, minutes, or a traceback: each is refused at once, by name."""

import functools
import io
import json
import pickle
import struct
import zipfile

import msgpack
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from ckptd.checkpoint.export.deepspeed.archives import Archive
from ckptd.shared.base.errors import CkptdError, DamagedError
from ckptd.shared.format.layout import Leaf
from ckptd.shared.torchfile import pickle_read
from ckptd.shared.torchfile.metadata_read import read_metadata
from ckptd_client._load.foreign.load_from import load_from
from ckptd_client._local.rank import Group
from ckptd_client._state.leaves import decode_leaf, encode_leaf
from tests.hostile.apart import apart

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]
MIB = 1 << 20


def load(path, state):
    return load_from(str(path), state, Group(0, 1, "test"))


def bounded(call, nbytes, *, refused=None):
    """The call, apart: an error of ours that says refused (None: or none), quickly, in little memory."""
    came = apart(call)
    assert came.kind in ("", "ours"), came
    assert came.seconds < 2, came
    assert came.grown < 16 * MIB + 10 * nbytes, came
    assert came.length < 2000, came
    assert refused is None or (came.kind == "ours" and refused in came.text), came
    return came


# --- pickles of shared tuples: a few bytes each, and twice as much text as the one before

_GROW = b"".join(b"h%ch%c\x86q%c0" % (i, i, i + 1) for i in range(60))
DAG = b"K\x01q\x000" + _GROW + b"h\x3c"  # 2^60 ones


def keyed_pickle(keys):
    """A dict of these keys, which is not made here."""
    return b"\x80\x02}(" + b"".join(pickle.dumps(key, 2)[2:-1] + b"N" for key in keys) + b"u."


def metadata_with(value, key):
    """A .metadata whose storage_data says value of key."""
    names = b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}"
    index = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n)\x81}(X\x03\x00\x00\x00fqnX\x01\x00\x00\x00wub"
    info = b"ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n)\x81}("
    for name, data in {
        "relative_path": b"X\x01\x00\x00\x00a",
        "offset": b"K\x00",
        "length": b"K\x09",
        key: value,
    }.items():
        info += b"X" + struct.pack("<I", len(name)) + name.encode() + data
    return b"\x80\x02" + names + b"(X\x0c\x00\x00\x00storage_data}" + index + info + b"ub" + b"sub."


@pytest.mark.parametrize("key", ["relative_path", "offset", "transform_descriptors", "fqn"])
def test_a_value_of_shared_tuples_is_never_written_out(key, tmp_path):
    raw = metadata_with(DAG, key)
    (tmp_path / ".metadata").write_bytes(raw)
    bounded(lambda: load(tmp_path, {"w": torch.zeros(2)}), len(raw))


@pytest.mark.parametrize(
    "what", [b"ctorch\nSize\n" + DAG + b"\x85R", DAG + DAG + b"R", b"}" + DAG + DAG + b"s", DAG + b"Q"]
)
def test_calls_with_shared_tuples_are_refused(what):
    bounded(lambda: read_metadata(b"\x80\x02" + what + b".", where="x"), 1000, refused="x is no metadata")


# --- numbers whose hash is one

PRIME = (1 << 61) - 1


@functools.cache
def of_one_hash(count):
    return [PRIME * number for number in range(1, count + 1)]


def test_ints_of_one_hash_are_no_keys_of_metadata():
    raw = keyed_pickle(of_one_hash(60_000))
    bounded(lambda: read_metadata(raw, where="x"), len(raw), refused="x is no metadata")


def test_ints_of_one_hash_in_a_trainers_file():
    raw = keyed_pickle(of_one_hash(60_000))
    bounded(lambda: pickle_read.loads(raw, where="x"), len(raw))
    raw = keyed_pickle(number << 40 for number in range(100_000))
    bounded(lambda: pickle_read.loads(raw, where="x"), len(raw))


def ext(code, body):
    return msgpack.packb(msgpack.ExtType(code, msgpack.packb(body)))


def big(number):
    return msgpack.ExtType(4, msgpack.packb(number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)))


def keyed(code, keys):
    return ext(code, [[key, None] for key in keys] if code in (6, 7, 8, 9) else keys)


@pytest.mark.parametrize("code", [2, 3, 6, 7, 8, 9])
@pytest.mark.parametrize("kind", ["ints", "tuples", "floats and complex"])
def test_keys_of_one_hash_in_a_leaf(code, kind):
    keys = {
        "ints": lambda: [big(number) for number in of_one_hash(15_000)],
        "tuples": lambda: [ext_of_tuple([big(number), 1]) for number in of_one_hash(15_000)],
        "floats and complex": lambda: [
            msgpack.ExtType(5, msgpack.packb([float(-1000003 * n), float(n)])) for n in range(15_000)
        ],
    }[kind]()
    data = keyed(code, keys)
    bounded(lambda: decode_leaf(Leaf("safe/1", data), "state['a']"), len(data), refused="state['a'] is damaged")


def ext_of_tuple(items):
    return msgpack.ExtType(1, msgpack.packb(items))


def test_keys_of_one_hash_in_a_plain_map():
    keys = [big(number) for number in of_one_hash(40_000)]
    data = b"\xdf" + struct.pack(">I", len(keys)) + b"".join(msgpack.packb(key) + b"\xc0" for key in keys)
    bounded(lambda: decode_leaf(Leaf("safe/1", data), "state['a']"), len(data), refused="state['a'] is damaged")


@pytest.mark.parametrize("keys", [
    range(20_000), [(i, i + 1) for i in range(10_000)], [float(i) for i in range(20_000)],
    [frozenset((i, i + 1)) for i in range(7_000)], [-i for i in range(20_000)],
], ids=["ints", "tuples", "floats", "sets", "negative ints"])  # fmt: skip
def test_honest_keys_come_back(keys):
    for value in (dict.fromkeys(keys, 1), set(keys)):
        assert decode_leaf(encode_leaf(value, "x"), "x") == value


def test_a_key_that_is_there_twice_is_refused():
    for data in (b"\x82\xa1a\x01\xa1a\x02", ext(6, [[1, 2], [1, 3]])):
        with pytest.raises(DamagedError, match="a key that is there twice"):
            decode_leaf(Leaf("safe/1", data), "x")


# --- archives that swell


def deflated(data, name="archive/data.pkl", fill=1 << 26):
    """An archive of these bytes and so many zeros, in a thousandth of them."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as made:
        made.writestr("archive/version", b"3\n")
        if name.endswith("data.pkl"):
            made.writestr(name, data + bytes(fill))
        else:
            made.writestr("archive/data.pkl", data)
            made.writestr(name, bytes(fill))
    return out.getvalue()


def a_dcp_directory(path, **state):
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path))
    return path


def put_in(path, name, data, shape=None):
    """Other bytes where the metadata says that the name lies; shape: of the tensor that they are said to be."""
    metadata = pickle.loads((path / ".metadata").read_bytes())  # noqa: S301 - our own
    if shape is not None:
        metadata.state_dict_metadata[name].size = torch.Size(shape)
        metadata.state_dict_metadata[name].chunks[0].sizes = torch.Size(shape)
    for index, info in metadata.storage_data.items():
        if index.fqn == name:
            info.relative_path, info.offset, info.length = "swollen", 0, len(data)
    (path / "swollen").write_bytes(data)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def test_a_value_that_swells_is_refused(tmp_path):
    data = deflated(pickle.dumps(0.5, 2))
    put_in(a_dcp_directory(tmp_path, w=torch.ones(2), lr=0.5), "lr", data)
    bounded(lambda: load(tmp_path, {"lr": 0.0}), len(data), refused="compressed")


def test_a_tensor_that_swells_is_refused(tmp_path):
    buffer = io.BytesIO()
    torch.save(torch.ones(4), buffer)
    with zipfile.ZipFile(buffer) as made:
        pickled = next(made.read(name) for name in made.namelist() if name.endswith("data.pkl"))
    data = deflated(pickled.replace(b"K\x04", b"J\x00\x00\x00\x01"), "archive/data/0")
    put_in(a_dcp_directory(tmp_path, w=torch.ones(4)), "w", data, shape=(1 << 24,))
    bounded(lambda: load(tmp_path, {"w": torch.zeros(1)}), len(data))
    bounded(lambda: load(tmp_path, {"w": torch.zeros(1).expand(1 << 24)}), len(data))


def test_a_tensor_of_one_element_is_not_spread_out(tmp_path):
    """Four bytes that stand for a gigabyte, since every stride is 0."""
    buffer = io.BytesIO()
    torch.save(torch.ones(1).expand(1 << 28), buffer)
    put_in(a_dcp_directory(tmp_path, w=torch.ones(4)), "w", buffer.getvalue(), shape=(1 << 28,))
    bounded(lambda: load(tmp_path, {"w": torch.zeros(1).expand(1 << 28)}), len(buffer.getvalue()), refused="'w'")


VALUES = {
    "names a call": b"\x80\x02" + DAG + b")R.",
    "a key": b"\x80\x02}" + DAG + b"K\x01s.",
    "a persistent id": b"\x80\x02" + DAG + b"Q.",
    "a set": lambda: b"\x80\x02cbuiltins\nset\n" + pickle.dumps(of_one_hash(60_000), 2)[2:-1] + b"\x85R.",
    "a dict": lambda: keyed_pickle(of_one_hash(60_000)),
    "zeros": b"\x80\x02cbuiltins\nbytearray\nJ\x00\x00\x00\x40\x85R.",
    "another code": b"\x80\x02c_codecs\nencode\nX\x00\x00\x01\x00"
    + b"a" * 65535
    + b"\xc3"
    + b"X\x08\x00\x00\x00punycode\x86R.",
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_whose_pickle_grows_is_refused(name, tmp_path):
    value = VALUES[name]() if callable(VALUES[name]) else VALUES[name]
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as made:
        made.writestr("archive/data.pkl", value)
        made.writestr("archive/version", b"3\n")
    put_in(a_dcp_directory(tmp_path, lr=0.5), "lr", out.getvalue())
    bounded(lambda: load(tmp_path, {"lr": 0.0}), len(out.getvalue()), refused="")


def test_a_directory_of_many_names_takes_little(tmp_path):
    """46 bytes each in the zip's own directory."""
    central = b"".join(
        struct.pack("<IHHHHHHIIIHHHHHII", 0x02014B50, 20, 20, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0)
        + b"%04x" % (n % 65536)
        for n in range(65_000)
    )
    data = central + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 65_000, 65_000, len(central), 0, 0)
    (tmp_path / "x.pt").write_bytes(data)
    bounded(lambda: Archive(str(tmp_path / "x.pt"), 0), len(data), refused="x.pt")


# --- headers that stock readers would not take


def safetensors_file(path, header, data=bytes(16)):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(start, stop, dtype="U8"):
    return {"dtype": dtype, "shape": [stop - start], "data_offsets": [start, stop]}


def twice(first, second):
    return b'{"a":' + json.dumps(first).encode() + b',"a":' + json.dumps(second).encode() + b"}"


HEADERS = {
    "a key twice": twice(entry(0, 16), entry(0, 16)),
    "a field twice": b'{"a":{"dtype":"U8","dtype":"U8","shape":[16],"data_offsets":[0,16]}}',
    "metadata twice": b'{"__metadata__":{"a":"1"},"__metadata__":{},"a":{"dtype":"U8","shape":[16],'
    b'"data_offsets":[0,16]}}',
    "an overlap": {"a": entry(0, 10), "b": entry(6, 16)},
    "the same bytes twice": {"a": entry(0, 16), "b": entry(0, 16)},
    "a hole": {"a": entry(0, 6), "b": entry(8, 16)},
    "a hole at the start": {"a": entry(8, 16)},
    "more behind the end": {"a": entry(0, 8)},
    "nothing for what lies there": {},
    "metadata of numbers": {"__metadata__": {"format": 1}, "a": entry(0, 16)},
    "a field too many": {"a": entry(0, 16) | {"more": 1}},
    "a list": b"[]",
    "a bool for an offset": {"a": {"dtype": "U8", "shape": [1], "data_offsets": [False, True]}},
    "no UTF-8": b'{"\xff": 1}',
    "a NUL in a name": {"a\0b": entry(0, 8), "b": entry(0, 16)},
    "deep": b'{"a":' + b"[" * 50_000,
    "a number of 10^6 digits": b'{"a":' + b"9" * 1_000_000 + b"}",
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_safetensors_refuses_is_refused(name, tmp_path):
    path = safetensors_file(tmp_path / "x.safetensors", HEADERS[name])
    if name not in {"a key twice", "a field too many"}:  # which it takes: of two the last
        with pytest.raises(Exception):  # noqa: B017, PT011 - the library's own, which says anything
            safetensors.torch.load_file(path)
    size = path.stat().st_size
    bounded(lambda: load(path, {"a": torch.zeros(16, dtype=torch.uint8)}), size, refused="x.safetensors")
    bounded(lambda: load(tmp_path, {"b": torch.zeros(10, dtype=torch.uint8)}), size, refused="x.safetensors")


def test_what_safetensors_takes_is_taken(tmp_path):
    path = safetensors_file(tmp_path / "x.safetensors", {"b": entry(10, 16), "e": entry(10, 10), "a": entry(0, 10)})
    assert set(safetensors.torch.load_file(path)) == {"a", "b", "e"}
    load(path, {"a": torch.zeros(10, dtype=torch.uint8), "e": torch.zeros(0, dtype=torch.uint8)})


# --- names


@pytest.mark.parametrize("name", ["a\0b.safetensors", "\ud800.safetensors", "\n.safetensors"])
def test_a_name_in_an_index_that_no_file_can_have(name, tmp_path):
    text = json.dumps({"weight_map": {"a": name}})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    bounded(lambda: load(tmp_path, {"a": torch.zeros(2)}), len(text), refused="model.safetensors")


@pytest.mark.parametrize("path", ["a\0b", "\ud800", "x" * 1000])
def test_a_path_that_cannot_be_one_is_a_misuse(path):
    came = bounded(lambda: load(f"/tmp/{path}", {"a": torch.zeros(2)}), 5000, refused="")
    assert "Traceback" not in came.text


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 300])
def test_a_file_of_dcp_that_no_file_can_be(name, tmp_path):
    a_dcp_directory(tmp_path, w=torch.ones(2), lr=0.5)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())  # noqa: S301 - our own
    for info in metadata.storage_data.values():
        info.relative_path = name
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    for state in ({"w": torch.zeros(2)}, {"lr": 0.0}):
        bounded(lambda state=state: load(tmp_path, state), 2000, refused="")


def test_zero_with_a_latest_that_no_file_can_be(tmp_path):
    from ckptd.checkpoint.export.run import Order, export  # noqa: PLC0415

    for name in ("a\0b", "\ud800", "x" * 3000, "../../..", ""):
        (tmp_path / "latest").write_bytes(name.encode("utf-8", "surrogatepass"))
        order = Order(source=str(tmp_path), out=str(tmp_path / "out.pt"), format="torch")
        with pytest.raises((CkptdError, OSError)):
            export(order)
