"""Every decoder on bytes that are cut anywhere, flipped anywhere, or random: a value, or an error of ours."""

import ast
import contextlib
import pathlib
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptd
from ckptd.checkpoint.verify import verify_path
from ckptd.shared.base.errors import CkptdError, DamagedError
from ckptd.shared.base.ids import JobKey
from ckptd.shared.format import layout as lay
from ckptd.shared.format import manifest as man
from ckptd.shared.format import rank_file, slot
from ckptd.shared.format.committed_record import decode_committed
from ckptd.shared.format.digest import digest
from ckptd.shared.format.header import check_header
from ckptd.shared.format.packed_layout import Known, decode_layout, joined, layout_in
from ckptd.shared.torchfile.metadata_read import stranger_in
from ckptd_client._load.rounds import read_checkpoint
from ckptd_client._local.rank import Group
from tests.checkpoints import SAVE, write_checkpoint
from tests.hostile import forge
from tests.hostile.reader import some_state
from tests.runs import manifest_in, vote_in

WHERE = "the file"


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("bytes"), [some_state()])


@pytest.fixture(scope="module")
def parts(sound):
    """What each decoder takes: (name, its bytes, decoder)."""
    record = forge.records_of(sound)[0]
    layout = layout_in(record.layout, where=WHERE, known=Known())
    image = (sound / record.name).read_bytes()
    objects = man.decode_vote(vote_in(sound).read_bytes(), where=WHERE).stock_objects
    page = slot.encode_seal(slot.Seal(job=JobKey("/store", "demo"), save=SAVE), 1)
    rank = rank_file.encode(rank_file.RankRecord(JobKey("/store", "demo"), 0, "session", "host"))
    return {
        "manifest": (manifest_in(sound).read_bytes(), lambda raw: man.decode_manifest(raw, where=WHERE)),
        "manifest's body": (
            manifest_in(sound).read_bytes()[8:-16],
            lambda raw: man.decode_manifest(forge.sealed(raw), where=WHERE),
        ),
        "vote's body": (
            vote_in(sound).read_bytes()[8:-16],
            lambda raw: man.decode_vote(forge.sealed(raw), where=WHERE),
        ),
        "committed": ((sound / man.COMMITTED).read_bytes(), lambda raw: decode_committed(raw, where=WHERE)),
        "layout": (joined(record.layout), lambda raw: decode_layout(raw, where=WHERE)),
        "plan": (record.plan, lambda raw: layout_in(record.layout._replace(plan=raw), where=WHERE, known=Known())),
        "form": (record.form, lambda raw: layout_in(record.layout._replace(form=raw), where=WHERE, known=Known())),
        "own": (record.own, lambda raw: layout_in(record.layout._replace(own=raw), where=WHERE, known=Known())),
        "leaves": (record.leaves, lambda raw: lay.decode_leaves(raw, where=WHERE)),
        "objects": (man.encode_objects(objects), lambda raw: man.decode_objects(raw, where=WHERE)),
        "header": (image[: layout.header_nbytes], lambda raw: check_header(raw, layout, SAVE, where=WHERE)),
        "rank file": (rank, lambda raw: rank_file.decode(raw, where=WHERE)),
        "seal": (page, lambda raw: slot.decode_seals(raw.ljust(slot.SEALS_NBYTES, b"\0")[: slot.SEALS_NBYTES])),
        "metadata": ((sound / ".metadata").read_bytes(), stranger_in),
    }


NAMES = [
    "manifest", "manifest's body", "vote's body", "committed", "layout", "plan", "form", "own",
    "leaves", "objects", "header", "rank file",
    "seal", "metadata",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_whole_is_read(parts, name):
    raw, decode = parts[name]
    decode(raw)
    assert set(parts) == set(NAMES)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("seal", "metadata")])
def test_cut_at_every_length(parts, name):
    raw, decode = parts[name]
    whole = len(raw.rstrip()) if name == "committed" else len(raw)  # its last byte is a newline
    for length in range(whole):
        with pytest.raises(DamagedError, match=WHERE):
            decode(raw[:length])


def test_cut_seals_are_free_and_cut_metadata_is_strange(parts):
    seal, metadata = parts["seal"][0], parts["metadata"][0]
    assert all(slot.decode_seals(seal[:n].ljust(8192, b"\0"))[2] == slot.Seal() for n in range(4080, 4096))
    assert all(stranger_in(metadata[:n]) for n in range(0, len(metadata), 7))


@pytest.mark.parametrize("name", NAMES)
def test_flipped_and_replaced_anywhere(parts, name):
    raw, decode = parts[name]

    @given(st.lists(st.tuples(st.integers(0, len(raw) - 1), st.integers(0, 255)), min_size=1, max_size=6))
    def check(changes):
        damaged = bytearray(raw)
        for at, byte in changes:
            damaged[at] = byte
        with contextlib.suppress(CkptdError):
            decode(bytes(damaged))

    check()


@given(st.sampled_from(NAMES), st.binary(max_size=300))
def test_random_bytes(parts, name, raw):
    with contextlib.suppress(CkptdError):
        parts[name][1](raw)


def test_nesting_beyond_all_reason(parts):
    deep = b"\x81\xa1x" + b"\x91" * 100_000 + b"\x01"
    for name in ("manifest's body", "vote's body", "layout", "own", "leaves", "objects"):
        with pytest.raises(DamagedError, match=WHERE):
            parts[name][1](deep)
    for name in ("committed", "rank file"):
        with pytest.raises(DamagedError, match=WHERE):
            parts[name][1](b'{"x":' + b"[" * 100_000)
    body = b"\x81\xa1x" + b"\x91" * 4000 + b"\x01"
    head = (slot._PREFIX.pack(slot._MAGIC, 1, len(body)) + body).ljust(4080, b"\0")
    page = head + digest(head)
    assert slot.decode_seals(page + page)[2] == slot.Seal()


leaf_bodies = st.recursive(
    st.none() | st.integers(-(1 << 63), (1 << 63) - 1) | st.text(max_size=4) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


FIELDS = [  # an example is a whole checkpoint, read twice
    *(("plan", name) for name in ("version", "tensors", "paths")),
    *(("form", name) for name in ("version", "count", "meshes", "ranks", "placements")),
    *(("own", name) for name in ("version", "rank", "header_nbytes", "image_nbytes", "aliases", "places", "plan_id")),
]


@settings(max_examples=max(15, settings.default.max_examples // 3))
@given(st.sampled_from(FIELDS), leaf_bodies)
def test_fields_of_other_kinds_reach_the_reader(sound, tmp_path_factory, field, value):
    """Through read_checkpoint and verify, digests made right: as an attacker would do it, value by value."""
    final = tmp_path_factory.mktemp("field") / "store/demo" / sound.name
    shutil.copytree(sound, final, symlinks=True)
    raw = forge.opened(forge.records_of(final)[0].layout)
    raw[field[0]][field[1]] = value
    forge.put_layout(final, forge.closed(raw))
    with contextlib.suppress(CkptdError):
        state = some_state()
        read_checkpoint(str(final), state, group=Group(0, 1, "test"))[0].finish(state)
    verify_path(str(final))
    shutil.rmtree(final.parents[2])


@given(st.sampled_from(range(8)), leaf_bodies, st.integers(0, 3))
def test_columns_of_other_kinds_reach_the_reader(sound, tmp_path_factory, column, value, which):
    final = tmp_path_factory.mktemp("entry") / "store/demo" / sound.name
    shutil.copytree(sound, final, symlinks=True)
    raw = forge.opened(forge.records_of(final)[0].layout)
    if len(raw["columns"][column]) > which and isinstance(value, int):
        raw["columns"][column][which] = value
    else:
        raw["columns"][column] = value
    forge.put_layout(final, forge.closed(raw))
    with contextlib.suppress(CkptdError):
        state = some_state()
        read_checkpoint(str(final), state, group=Group(0, 1, "test"))[0].finish(state)
    verify_path(str(final))
    shutil.rmtree(final.parents[2])


# --- what errors say


def sources():
    root = pathlib.Path(ckptd.__file__).parents[1]
    return [path for folder in ("ckptd", "client") for path in sorted((root / folder).rglob("*.py"))]


def handlers(path):
    """Of what decoding raises: the name of the error, and what is said in the handler."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler) and node.name and "MALFORMED" in ast.unparse(node.type):
            yield node


def test_what_decoding_raises_is_never_reported_whole():
    """It holds text of the message: a tag that is none, say, of a megabyte."""
    found = [(path, node) for path in sources() for node in handlers(path)]
    assert len(found) > 12
    whole = [
        f"{path}:{part.lineno}"
        for path, node in found
        for part in ast.walk(node)
        if isinstance(part, ast.FormattedValue) and ast.unparse(part.value) == node.name
    ]
    assert whole == []


# What they tell comes from files: a text may be a megabyte, and a tuple of tuples more than there is memory.
TELLING = [
    *(f"ckptd/shared/format/{name}.py" for name in ("committed", "header", "layout", "manifest")),
    *(f"ckptd/shared/torchfile/{name}.py" for name in ("metadata_read", "pickle_read", "zip_read")),
    *(f"client/ckptd_client/_load/foreign/{name}.py" for name in ("dcp", "safetensors")),
    "client/ckptd_client/_state/leaf_arrays.py",
]


@pytest.mark.parametrize("name", TELLING)
def test_no_value_of_a_file_is_reported_by_its_repr(name):
    tree = ast.parse((pathlib.Path(ckptd.__file__).parents[1] / name).read_text())
    parts = [part for part in ast.walk(tree) if isinstance(part, ast.FormattedValue) and part.conversion == ord("r")]
    assert [part.lineno for part in parts] == []
