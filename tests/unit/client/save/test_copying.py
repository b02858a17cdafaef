"""Reading a segment back: every size around the block and page limits, every way to cut it, and what is missing."""

import errno
import fcntl
import os
import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from ckptd.shared.base.errors import DamagedError, MismatchError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.files.regular import open_direct
from ckptd.shared.format.digest import BLOCK_NBYTES, blocks, digest
from ckptd.shared.format.layout import VERSION, Layout, Leaves, decode_leaves
from ckptd.shared.format.packed_layout import decode_layout
from ckptd.shared.format.slot import PAGE, SlotState, slot_capacity
from ckptd.shared.stores.directory import OpenedFile
from ckptd_client._image.plan import gather, make_plan
from ckptd_client._load.fit import fit
from ckptd_client._load.reader import Piece, Source, Target, copy_out, open_slot
from ckptd_client._load.saved_names import OtherRanksNeededError, saves_of
from tests.runs import RUN
from tests.slots import reseal, some_tensors, write_slot

KEY = JobKey("/pfs", "job")
SAVE = SaveId(1, 2, 3, RUN)
SIZES = (
    1, PAGE - 1, PAGE, PAGE + 1, BLOCK_NBYTES - 1, BLOCK_NBYTES, BLOCK_NBYTES + 1, BLOCK_NBYTES + PAGE + 1,
    2 * BLOCK_NBYTES - 1, 2 * BLOCK_NBYTES, 2 * BLOCK_NBYTES + 1,
)  # fmt: skip
CUTS = (1, 7, PAGE - 1, PAGE + 1, BLOCK_NBYTES - PAGE, BLOCK_NBYTES - 3, BLOCK_NBYTES + 5, 2 * BLOCK_NBYTES - 1)
DATA = np.random.default_rng(5).bytes(2 * BLOCK_NBYTES + 1)


def layout_of(nbytes):
    return Layout(
        version=VERSION, file="r00000-p00.safetensors", rank=0, world_size=1, header_nbytes=0, image_nbytes=nbytes,
        plan_id="", tensors=[], paths={}, aliases={},
    )  # fmt: skip


@pytest.fixture
def source_of(tmp_path):
    """A Source over these bytes in a file, or over fewer of them than it says."""
    made = []

    def make(data, *, direct=False, missing=0, readers=2):
        path = tmp_path / "image"
        path.write_bytes(data[: len(data) - missing])
        fd = open_direct(str(path)) if direct else os.open(path, os.O_RDONLY)
        table = b"".join(digest(data[start:stop]) for start, stop in blocks(len(data)))
        leaves = Leaves(VERSION, {})
        files = (Piece(OpenedFile(fd), str(path), 0, len(data)),)
        made.append(Source(files, str(path), len(data), table, layout_of(len(data)), leaves, readers))
        return made[-1]

    yield make
    for source in made:
        source.close()


def cut(nbytes):
    """Tensors that cover an image of nbytes end to end, and where each begins."""
    edges = sorted({0, nbytes, *(at for at in CUTS if at < nbytes)})
    return [(start, torch.zeros(stop - start, dtype=torch.uint8)) for start, stop in pairwise(edges)]


def targets_of(pieces):
    return [Target(start, len(tensor), tensor.data_ptr()) for start, tensor in pieces]


@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
@pytest.mark.parametrize("nbytes", SIZES)
def test_every_byte_arrives_whatever_the_size_and_the_cuts(nbytes, direct, source_of):
    data = DATA[:nbytes]
    pieces = cut(nbytes)
    random.Random(nbytes).shuffle(pieces)
    copy_out(source_of(data, direct=direct), targets_of(pieces))
    pieces.sort(key=lambda piece: piece[0])
    assert b"".join(tensor.numpy().tobytes() for _, tensor in pieces) == data


@pytest.mark.parametrize("readers", [1, 2, 5])
def test_one_tensor_over_all_blocks_and_holes_around_it(readers, source_of):
    tensor = torch.zeros(len(DATA) - 200, dtype=torch.uint8)
    copy_out(source_of(DATA, readers=readers), [Target(100, len(tensor), tensor.data_ptr())])
    assert tensor.numpy().tobytes() == DATA[100:-100]


def test_the_same_bytes_may_go_to_two_places(source_of):
    one, two = torch.zeros(len(DATA), dtype=torch.uint8), torch.zeros(9, dtype=torch.uint8)
    targets = [Target(0, len(one), one.data_ptr()), Target(BLOCK_NBYTES - 4, 9, two.data_ptr())]
    copy_out(source_of(DATA), targets)
    assert one.numpy().tobytes() == DATA
    assert two.numpy().tobytes() == DATA[BLOCK_NBYTES - 4 : BLOCK_NBYTES + 5]


def test_nothing_to_copy_is_checked_all_the_same(source_of):
    copy_out(source_of(b""), [])
    copy_out(source_of(DATA), [])
    source = source_of(DATA)
    os.truncate(source.where, 0)
    with open(source.where, "wb") as file:
        file.write(DATA[:-1] + b"?")
    with pytest.raises(DamagedError, match=r"image: block 2 \(bytes 33554432 to 33554433\) does not match"):
        copy_out(source, [])


def test_of_an_image_of_which_parts_are_wanted_only_their_blocks_are_read(source_of):
    source = source_of(DATA)
    with open(source.where, "wb") as file:
        file.write(b"?" + DATA[1:])
    tensor = torch.zeros(9, dtype=torch.uint8)
    copy_out(source, [Target(2 * BLOCK_NBYTES - 8, 9, tensor.data_ptr())], sparse=True)
    assert tensor.numpy().tobytes() == DATA[2 * BLOCK_NBYTES - 8 :]
    with pytest.raises(DamagedError, match="image: block 0 "):
        copy_out(source, [Target(BLOCK_NBYTES - 1, 9, tensor.data_ptr())], sparse=True)


@pytest.mark.parametrize("block", [0, 1, 2])
def test_of_a_bad_block_no_byte_is_copied(block, source_of):
    bad = bytearray(DATA)
    bad[block * BLOCK_NBYTES] ^= 1
    source = source_of(DATA)
    with open(source.where, "r+b") as file:
        file.write(bad)
    tensor = torch.zeros(len(DATA), dtype=torch.uint8)
    with pytest.raises(DamagedError, match=f"image: block {block} "):
        copy_out(source, [Target(0, len(tensor), tensor.data_ptr())])
    assert not tensor[block * BLOCK_NBYTES : (block + 1) * BLOCK_NBYTES].any()


SHORT = (1, PAGE - 1, PAGE, PAGE + 1, BLOCK_NBYTES, BLOCK_NBYTES + 1, 2 * BLOCK_NBYTES, 2 * BLOCK_NBYTES + 1)


@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
@pytest.mark.parametrize("missing", [n for n in SHORT if (len(DATA) - n) % PAGE == 0])
def test_a_file_that_became_short_is_reported_with_its_end(missing, direct, source_of):
    source = source_of(DATA, direct=direct, missing=missing)
    with pytest.raises(DamagedError, match="image: "):
        copy_out(source, [])


@pytest.mark.parametrize("missing", [n for n in SHORT if (len(DATA) - n) % PAGE])
def test_a_file_that_became_short_inside_a_page_is_reported_with_its_end(missing, source_of):
    source = source_of(DATA, missing=missing)
    with pytest.raises(DamagedError, match="image: "):
        copy_out(source, [])


def test_a_file_system_without_direct_reads_is_read_through_the_cache(source_of, monkeypatch):
    real = os.open

    def refusing(path, flags, *args, **more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args, **more)

    monkeypatch.setattr(os, "open", refusing)
    tensor = torch.zeros(len(DATA), dtype=torch.uint8)
    source = source_of(DATA, direct=True)
    assert not fcntl.fcntl(source.files[0].file.fd, fcntl.F_GETFL) & os.O_DIRECT
    copy_out(source, [Target(0, len(tensor), tensor.data_ptr())])
    assert tensor.numpy().tobytes() == DATA


def test_a_file_system_that_refuses_the_direct_read_itself_is_read_through_the_cache(source_of, monkeypatch):
    real = os.preadv

    def refusing(fd, *args):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, *args)

    monkeypatch.setattr(os, "preadv", refusing)
    copy_out(source_of(DATA, direct=True), [])


def test_reads_that_return_less_than_asked_are_gone_on_with(source_of, monkeypatch):
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: real(fd, [views[0][: 3 * PAGE]], at))
    short = DATA[: 10 * PAGE + 17]
    tensor = torch.zeros(len(short), dtype=torch.uint8)
    copy_out(source_of(short, direct=True), [Target(0, len(tensor), tensor.data_ptr())])
    assert tensor.numpy().tobytes() == short


# --- slots


def test_a_slot_is_opened_by_the_seal_of_that_save_only(tmp_path):
    slot = write_slot(tmp_path / "slot", KEY, SAVE)
    source = open_slot(slot.path, KEY, SAVE, 0)
    copy_out(source, [])
    assert (source.nbytes, source.layout) == (len(slot.image), slot.layout)
    source.close()
    for key, save, rank in (
        (JobKey("/pfs", "other"), SAVE, 0),
        (KEY, SaveId(1, 3, 3, RUN), 0),
        (KEY, SaveId(2, 2, 3, RUN), 0),
        (KEY, SAVE, 1),
    ):
        with pytest.raises(DamagedError, match=r"slot: its seal is not that of"):
            open_slot(slot.path, key, save, rank)


def test_a_slot_without_digests_is_not_read(tmp_path):
    slot = write_slot(tmp_path / "slot", KEY, SAVE, state=SlotState.SEALED)
    with pytest.raises(DamagedError, match="its seal is not that of"):
        open_slot(slot.path, KEY, SAVE, 0)


@pytest.mark.parametrize("nbytes", [0, 1, PAGE, 2 * PAGE, 3 * PAGE])
def test_a_slot_that_is_too_short_is_damaged(nbytes, tmp_path):
    slot = write_slot(tmp_path / "slot", KEY, SAVE, some_tensors(100_000))
    with open(slot.path, "rb") as file:
        data = file.read()
    with open(slot.path, "wb") as file:
        file.write(data[len(data) - nbytes :])
    with pytest.raises(DamagedError, match=r"slot: its seal (is not that of|claims more bytes)"):
        open_slot(slot.path, KEY, SAVE, 0)


def test_a_slot_that_got_another_save_is_not_read(tmp_path):
    slot = write_slot(tmp_path / "slot", KEY, SAVE)
    reseal(slot, type(slot.seal)())
    with pytest.raises(DamagedError, match="its seal is not that of"):
        open_slot(slot.path, KEY, SAVE, 0)


# --- fitting


def saved(state, rank=0, world_size=1):
    """Layout and leaves of a state, as a save would write them."""
    plan = make_plan(state, rank=rank, world_size=world_size)
    values = gather(plan, state)
    assert plan.exact_capacity(len(values.plain.leaves)) == slot_capacity(
        plan.nbytes, len(plan.layout), len(values.plain.leaves)
    )
    return decode_layout(plan.layout, where="here"), decode_leaves(values.plain.leaves, where="here")


def fit_one(state, saved_state):
    """A lone rank's state onto what a lone rank saved; the fit and its targets."""
    layout, leaves = saved(saved_state)
    found = fit(state, saves_of([layout], leaves, rank=0, world_size=1), where="here")
    assert set(found.targets) <= {0}
    return found, found.targets.get(0, [])


def fit_rank(state, *saved_states, rank=0, world_size=None, read=None):
    """A rank's state onto what these ranks saved, all of it or only the image of one."""
    ranks = [saved(content, i, len(saved_states)) for i, content in enumerate(saved_states)]
    layouts = [layout for layout, _ in ranks] if read is None else [ranks[read][0]]
    leaves = ranks[rank if rank < len(ranks) else 0][1]
    like = rank if rank < len(ranks) else 0
    return fit(state, saves_of(layouts, leaves, rank=like, world_size=world_size or len(ranks)), where="here")


def test_contiguous_tensors_are_read_in_place_and_others_through_a_copy():
    saved_state = {"a": torch.zeros(4, 5), "b": torch.zeros(4, 5), "e": torch.zeros(0)}
    state = {"a": torch.zeros(4, 5), "b": torch.zeros(5, 4).t(), "e": torch.zeros(0)}
    found, targets = fit_one(state, saved_state)
    addresses = {target.address for target in targets}
    assert len(targets) == 2, "an empty tensor needs no bytes"
    assert state["a"].data_ptr() in addresses
    assert state["b"].data_ptr() not in addresses
    [(scratch, tensor)] = found.through
    scratch.copy_(torch.arange(20.0).reshape(4, 5))
    found.finish(state)
    assert tensor is not None
    assert torch.equal(state["b"], torch.arange(20.0).reshape(4, 5))


def test_tied_tensors_get_their_bytes_once():
    one = torch.zeros(100)
    assert len(fit_one({"a": one, "b": one}, {"a": one, "b": one})[1]) == 1
    untied = {"a": torch.zeros(100), "b": torch.zeros(100)}
    assert len(fit_one(untied, {"a": one, "b": one})[1]) == 2


def test_a_tensor_whose_elements_share_memory_is_a_misfit():
    state = {"e": torch.zeros(3, 1).expand(3, 4)}
    with pytest.raises(MismatchError, match=r"state\['e'\]"):
        fit_one(state, {"e": torch.zeros(3, 4)})


# --- fitting onto what several ranks saved


def test_a_tensor_that_this_rank_did_not_save_is_asked_of_the_others():
    with pytest.raises(OtherRanksNeededError, match=r"state\['b'\]"):
        fit_rank({"a": torch.zeros(2), "b": torch.zeros(3)}, {"a": torch.zeros(2)}, {"b": torch.zeros(3)}, read=0)
    found = fit_rank({"a": torch.zeros(2), "b": torch.zeros(3)}, {"a": torch.zeros(2)}, {"b": torch.zeros(3)})
    assert set(found.targets) == {0, 1}


def test_a_tensor_that_none_saved_is_a_misfit():
    with pytest.raises(MismatchError, match=r"state\['b'\]: a tensor in the state, none in the checkpoint"):
        fit_rank({"a": torch.zeros(2), "b": torch.zeros(3)}, {"a": torch.zeros(2)}, {"a": torch.zeros(2)})


def test_each_rank_gets_its_own_of_what_all_have():
    states = [{"rng": torch.zeros(4 + rank), "who": rank} for rank in range(2)]
    for rank in range(2):
        found = fit_rank({"rng": torch.zeros(4 + rank), "who": 9}, *states, rank=rank)
        assert set(found.targets) == {rank}
        assert found.leaves == {"who": rank}


def test_a_rank_that_there_was_not_goes_on_with_what_rank_0_has():
    states = [{"rng": torch.zeros(4), "who": rank} for rank in range(2)]
    found = fit_rank({"rng": torch.zeros(4), "who": 9}, *states, rank=5, world_size=6)
    assert set(found.targets) == {0}
    assert found.leaves == {"who": 0}


def test_names_of_other_ranks_alone_are_their_business():
    states = [{"w": torch.zeros(2), f"rng.{rank}": torch.zeros(3), f"seed.{rank}": rank} for rank in range(4)]
    for world_size in (1, 2, 4, 5):
        found = fit_rank({"w": torch.zeros(2), "rng.0": torch.zeros(3), "seed.0": 7}, *states, world_size=world_size)
        assert found.leaves == {"seed.0": 0}
        assert set(found.tensors) == {"w", "rng.0"}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_every_rank_saved_must_have_a_place(world_size):
    states = [{"w": torch.zeros(2), "epoch": 3}] * 2
    with pytest.raises(MismatchError, match=r"state\['epoch'\]: in the checkpoint, not in the state"):
        fit_rank({"w": torch.zeros(2)}, *states, world_size=world_size)
    with pytest.raises(MismatchError, match=r"state\['w'\]: in the checkpoint, not in the state"):
        fit_rank({"epoch": 3}, *states, world_size=world_size)
