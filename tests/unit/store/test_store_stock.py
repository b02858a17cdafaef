"""A committed directory opens with a plain dcp.load, and what is there for stock readers is pinned like the rest."""

import io
import os
import struct
import zipfile
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptd.checkpoint import verify
from ckptd.checkpoint.verify import verify_path
from ckptd.shared.base.errors import DamagedError
from ckptd.shared.base.ids import JobKey, SaveId, file_name
from ckptd.shared.format import layout as lay
from ckptd.shared.format.digest import digest
from ckptd.shared.format.dtypes import DTYPES
from ckptd.shared.format.manifest import (
    STOCK_METADATA,
    STOCK_OBJECTS,
    StockObjects,
    decode_manifest,
    decode_vote,
    encode_record,
)
from ckptd.shared.format.packed_layout import Parts, decode_layout, encode_layout, joined
from ckptd.shared.format.slot import align_up
from ckptd.shared.torchfile import dcp_metadata
from ckptd.shared.torchfile.pickling import dumps
from ckptd.store.image import Flow, Image
from ckptd.store.posix.commit import commit, write_vote
from ckptd.store.posix.image_writer import make_set, write_image
from ckptd.store.posix.scan import Place
from ckptd.store.stock_files import stock_files
from ckptd.system.files import FileLayer
from tests.runs import RUN, SET, manifest_in
from tests.slots import Slot, build_image, make_vote, write_slot

SAVE = SaveId(1, 2, 30, RUN)
CODES = {getattr(torch, dtype.torch): code for code, dtype in DTYPES.items()}
PACKED = {"float4_e2m1fn_x2"}  # torch cannot copy it, so dcp.load cannot either
OBJECTS = StockObjects(b"0123456789", {"step": (0, 4), "lr": (4, 6)})
STOCK = [STOCK_OBJECTS, STOCK_METADATA]


def drain(store, slots, *, objects=OBJECTS):
    """The images of slots on the store, with the votes of a node each."""
    key, fs = JobKey(str(store), "demo"), FileLayer()
    place = Place(key, SAVE)
    make_set(fs, place, SET)
    for rank, slot in enumerate(slots):
        padded = memoryview(slot.image.ljust(align_up(len(slot.image)), b"\0"))
        write_image(fs, place, SET, Image(slot.layout.file, len(slot.image), padded), Flow())
        mine = objects if rank == 0 else None
        write_vote(fs, key, make_vote(key, SAVE, f"node{rank}", [slot], world_size=len(slots), objects=mine))
    return place


def slots_in(folder, *, archives=True):
    key = JobKey(str(folder), "demo")
    return [write_slot(folder / f".{r}", key, SAVE, rank=r, world_size=2, archives=archives) for r in range(2)]


@pytest.fixture
def place(tmp_path):
    (tmp_path / "store").mkdir()
    return drain(tmp_path / "store", slots_in(tmp_path))


def finish(place, writer="test"):
    commit(FileLayer(), place.key, SAVE, writer)
    return Path(place.final)


def manifest_of(final):
    return decode_manifest(manifest_in(final).read_bytes(), where="here")


def words(final):
    return "\n".join(map(str, verify.verify_path(str(final)).problems))


# -- the commit --


def test_the_manifest_pins_what_stock_readers_get(place):
    final = finish(place)
    assert [stock.name for stock in manifest_of(final).stock] == STOCK
    for stock in manifest_of(final).stock:
        data = (final / stock.name).read_bytes()
        assert (stock.nbytes, stock.digest) == (len(data), digest(data))
    assert (final / STOCK_OBJECTS).read_bytes() == OBJECTS.data
    assert words(final) == ""


def test_images_without_archives_have_no_metadata(tmp_path):
    (tmp_path / "store").mkdir()
    final = finish(drain(tmp_path / "store", slots_in(tmp_path, archives=False), objects=None))
    assert manifest_of(final).stock == []
    assert not {STOCK_METADATA, STOCK_OBJECTS} & set(os.listdir(final))


def test_a_layout_that_none_can_read_costs_only_the_metadata(tmp_path):
    (tmp_path / "store").mkdir()
    slots = slots_in(tmp_path)
    slots[1] = Slot(**{**vars(slots[1]), "layout_raw": joined(Parts(b"?", b"?", b"?"))})
    final = finish(drain(tmp_path / "store", slots))
    assert [stock.name for stock in manifest_of(final).stock] == [STOCK_OBJECTS]


def test_too_many_boxes_cost_the_metadata_and_are_said(tmp_path, monkeypatch):
    monkeypatch.setattr(dcp_metadata, "MAX_BOXES", 2)
    (tmp_path / "store").mkdir()
    place = drain(tmp_path / "store", slots_in(tmp_path))
    outcome = commit(FileLayer(), place.key, SAVE, "test")
    assert outcome.committed.left_out == "its tensors are in more than 2 boxes"
    assert [stock.name for stock in manifest_of(Path(place.final)).stock] == [STOCK_OBJECTS]
    assert commit(FileLayer(), place.key, SAVE, "test").committed == outcome.committed
    assert manifest_of(Path(place.final)).left_out == outcome.committed.left_out
    assert not verify_path(place.final).problems


def test_counting_boxes_is_work_that_shows(tmp_path, monkeypatch):
    """Of a large job whose ranks have boxes of their own each form is inflated: seconds, and no store call."""
    monkeypatch.setattr(dcp_metadata, "MAX_BOXES", 2)
    votes = [make_vote(JobKey(str(tmp_path), "demo"), SAVE, "a", slots_in(tmp_path), world_size=2)]
    signs = []
    assert stock_files(votes, SAVE, lambda: signs.append(1)).left_out
    assert len(signs) == 2


def test_without_archives_nothing_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(dcp_metadata, "MAX_BOXES", 2)
    (tmp_path / "store").mkdir()
    place = drain(tmp_path / "store", slots_in(tmp_path, archives=False))
    assert commit(FileLayer(), place.key, SAVE, "test").committed.left_out == ""


def test_a_committer_of_another_version_keeps_what_the_first_wrote(place):
    """The first was killed when it had written its own idea of `.metadata`."""
    theirs = dumps("of another version")
    (Path(place.partial) / STOCK_METADATA).write_bytes(theirs)
    final = finish(place)
    assert (final / STOCK_METADATA).read_bytes() == theirs
    assert words(final) == ""


def test_the_split_into_votes_does_not_matter(tmp_path):
    key, slots = JobKey(str(tmp_path), "demo"), slots_in(tmp_path)
    one = [make_vote(key, SAVE, "a", slots[::-1], world_size=2, objects=OBJECTS)]
    two = [
        make_vote(key, SAVE, "a", [slots[1]], world_size=2, objects=StockObjects(b"", {})),  # not rank 0's: ignored
        make_vote(key, SAVE, "b", [slots[0]], world_size=2, objects=OBJECTS),
    ]
    assert stock_files(one, SAVE) == stock_files(two, SAVE)
    assert list(stock_files(one, SAVE).files) == STOCK


# -- verify --


@pytest.mark.parametrize("name", STOCK)
def test_any_bit_of_them_is_noticed(place, name):
    path = finish(place) / name
    sound = path.read_bytes()
    for at in range(0, len(sound), 7):
        path.write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
        assert f"{path}: is not the file" in words(path.parent)
    path.write_bytes(sound + b"x")
    assert f"{path}: is not the file" in words(path.parent)
    path.unlink()
    assert f"{path}: missing" in words(path.parent)


def test_a_metadata_that_the_manifest_does_not_know_is_noticed(tmp_path):
    (tmp_path / "store").mkdir()
    final = finish(drain(tmp_path / "store", slots_in(tmp_path, archives=False), objects=None))
    (final / STOCK_METADATA).write_bytes(b"crafted")
    assert f"{final / STOCK_METADATA}: no part of the checkpoint" in words(final)
    os.unlink(manifest_in(final))
    assert STOCK_METADATA not in words(final)


# -- records --


def test_a_leaf_outside_the_objects_is_refused(tmp_path):
    objects = StockObjects(b"0123", {"step": (2, 3)})
    raw = encode_record(make_vote(JobKey("/s", "demo"), SAVE, "a", [], world_size=1, objects=objects))
    with pytest.raises(DamagedError, match=STOCK_OBJECTS):
        decode_vote(raw, where="here")


def test_records_of_an_older_version_have_none():
    raw = encode_record(make_vote(JobKey("/s", "demo"), SAVE, "a", [], world_size=1))
    assert b"stock" not in raw
    assert decode_vote(raw, where="here").stock_objects is None


def a_layout(**changes):
    _, layout = build_image(SAVE, {"w": ("U8", (64,), bytes(64)), "v": ("U8", (64,), bytes(64))}, archives=True)
    first = msgspec.structs.replace(layout.tensors[0], **changes)
    return msgspec.structs.replace(layout, tensors=[first, *layout.tensors[1:]])


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"slice_offset": 4095}, "outside its image"),
        ({"slice_nbytes": 145}, "over another"),
        ({"slice_nbytes": 1 << 40}, "outside its image"),
    ],
)
def test_archives_that_cannot_be_are_refused(changes, what):
    assert a_layout().tensors[0].extent == (4096, 4240)
    with pytest.raises(DamagedError, match=what):
        decode_layout(encode_layout(a_layout(**changes)), where="here")


# -- a stock reader --


def saved(value):
    into = io.BytesIO()
    torch.save(value, into)
    return into.getvalue()


def payload_offset(archive):
    """Where in a torch.save archive the one tensor's bytes start."""
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        (info,) = [info for info in file.infolist() if info.filename.endswith("data/0")]
    name_nbytes, extra_nbytes = struct.unpack_from("<HH", archive, info.header_offset + 26)
    return info.header_offset + 30 + name_nbytes + extra_nbytes


def real_slot(rank, boxes, paths, aliases):
    """A rank's image out of archives by torch itself. boxes: name, the rank's part, its offsets, the global shape."""
    image, entries = b"\0" * 4096, []
    for name, tensor, offsets, shape in boxes:
        archive = saved(tensor.clone())
        at = len(image) + (payload_offset(archive) if tensor.numel() else 0)
        box = (name, CODES[tensor.dtype], shape, offsets, tuple(tensor.shape))
        entries.append(lay.TensorEntry(*box, at, tensor.nbytes, len(image), len(archive)))
        image += archive
    layout = lay.Layout(
        version=lay.VERSION, file=file_name(rank), rank=rank, world_size=2, header_nbytes=4096,
        image_nbytes=len(image), plan_id="test", tensors=entries, paths=paths, aliases=aliases,
    )  # fmt: skip
    return Slot(
        "", None, image, layout, encode_layout(layout), lay.encode_leaves(lay.Leaves(lay.VERSION, {})), digest(image)
    )


def parts(model, rank):
    """What a rank of two holds: half the rows of `halves`, all of the others."""
    for name, tensor in model.items():
        first = 4 * rank if name == "model.halves" else 0
        last = first + 4 if name == "model.halves" else None
        offsets = (first, *[0] * (tensor.dim() - 1)) if tensor.dim() else ()
        yield name, tensor[first:last] if tensor.dim() else tensor, offsets, tuple(tensor.shape)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_plain_dcp_load_reads_it_back(tmp_path):
    tensors = {name: torch.arange(12).reshape(6, 2).to(dtype) for dtype, name in CODES.items() if name not in PACKED}
    tensors |= {"halves": torch.randn(8, 3), "scalar": torch.tensor(5), "nothing": torch.zeros(0, 4)}
    model = {f"model.{name}": tensor for name, tensor in tensors.items()}
    paths = {f"model.{name}": (("k", "model"), ("k", name)) for name in (*tensors, "tied")}
    paths |= {"step": (("k", "step"),), "lrs": (("k", "lrs"),)}
    step, lrs = saved(7), saved([0.5, 0.25])
    objects = StockObjects(step + lrs, {"step": (0, len(step)), "lrs": (len(step), len(lrs))})
    tied = {"model.tied": "model.halves"}
    slots = [real_slot(rank, parts(model, rank), paths, tied) for rank in range(2)]

    final = finish(drain(tmp_path, slots, objects=objects))

    tensors["tied"] = tensors["halves"]
    state = {"model": {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, "step": 0, "lrs": []}
    dcp.load(state, checkpoint_id=final)
    assert (state["step"], state["lrs"]) == (7, [0.5, 0.25])
    for name, tensor in tensors.items():
        assert torch.equal(state["model"][name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), (
            name
        )


def test_a_commit_gives_signs_of_life_while_the_list_is_made(tmp_path):
    """For each image when its boxes are counted and when they are read, and thrice for each tensor of the list."""
    key, signs = JobKey(str(tmp_path), "demo"), []
    votes = [make_vote(key, SAVE, f"n{rank}", [slot], world_size=2) for rank, slot in enumerate(slots_in(tmp_path))]
    assert STOCK_METADATA in stock_files(votes, SAVE, lambda: signs.append(1)).files
    assert len(signs) == 2 * len(votes) + 3 * 2
