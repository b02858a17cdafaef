"""However ranks cut a tensor, the pieces put it together again; whatever does not tile it is refused by name."""

import itertools
import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ckptd.checkpoint.export import write
from ckptd.checkpoint.export.plan import Part, Target, batches, whole_tensors
from ckptd.shared.base.errors import DamagedError
from ckptd.shared.base.ids import file_name
from ckptd.shared.format import layout as lay
from ckptd.shared.format.digest import BLOCK_NBYTES
from ckptd.shared.format.dtypes import itemsize
from tests.boxes import some_whole


def layout(rank, world_size, entries, *, aliases=None):
    """entries: (name, dtype, global shape, offsets, sizes); payloads end to end from byte 4096."""
    at, tensors = 4096, []
    for name, dtype, shape, offsets, sizes in entries:
        nbytes = lay.box_nbytes(dtype, sizes)
        tensors.append(lay.TensorEntry(name, dtype, shape, offsets, sizes, at, nbytes))
        at += nbytes
    return lay.Layout(
        version=1, file=file_name(rank), rank=rank, world_size=world_size, header_nbytes=4096, image_nbytes=at,
        plan_id="x", tensors=tensors, paths={}, aliases=aliases or {},
    )  # fmt: skip


def layouts_of(dtype, shape, boxes, ranks=1):
    return [
        layout(rank, ranks, [("w", dtype, shape, *box) for i, box in enumerate(boxes) if i % ranks == rank])
        for rank in range(ranks)
    ]


class Files:
    """Stands for the verified reader: the bytes of each file, handed out in blocks of some size."""

    def __init__(self, contents, block):
        self.contents = contents
        self.block = block

    def read(self, file, start, nbytes):
        stop = start + nbytes
        while start < stop:
            take = min(self.block - start % self.block, stop - start)
            with memoryview(self.contents[file])[start : start + take] as view:  # as the reader does
                yield view
            start += take


def contents_of(layouts, whole):
    files = []
    for one in layouts:
        raw = bytearray(one.image_nbytes)
        for entry in one.tensors:
            raw[entry.data_offset : entry.data_offset + entry.nbytes] = whole.box(entry.offsets, entry.sizes)
        files.append(bytes(raw))
    return files


def assembled(layouts, whole, piece_nbytes):
    tensor = whole_tensors(layouts, {"w"})["w"]
    files = Files(contents_of(layouts, whole), block=37)
    out = bytearray(b"\xee" * tensor.nbytes)
    covered = 0
    for piece in itertools.chain.from_iterable(batches([Target(tensor, 0, 4096, tensor.dtype)], piece_nbytes)):
        assert 0 < piece.nbytes <= max(piece_nbytes, itemsize(tensor.dtype))
        with memoryview(out)[piece.start : piece.start + piece.nbytes] as into:
            for part in piece.parts:
                write._place(part, files, into)
                covered += part.nbytes
    assert covered == tensor.nbytes
    return bytes(out)


@st.composite
def tilings(draw):
    """A shape and boxes that tile it: cut again and again along some dimension, at any place."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=4)))
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, sizes[dim]))
        for first, size in ((0, at), (at, sizes[dim] - at)):
            boxes.append(
                (
                    (*offsets[:dim], offsets[dim] + first, *offsets[dim + 1 :]),
                    (*sizes[:dim], size, *sizes[dim + 1 :]),
                )
            )
    return shape, draw(st.permutations(boxes))


@settings(deadline=None, max_examples=300)
@given(tilings(), st.sampled_from(["U8", "BF16", "F32", "I64"]), st.integers(1, 4), st.sampled_from([1, 8, 40, 4096]))
def test_any_tiling_over_any_ranks_comes_together(tiling, dtype, ranks, piece_nbytes):
    shape, boxes = tiling
    whole = some_whole(dtype, shape)
    assert assembled(layouts_of(dtype, shape, boxes, ranks), whole, piece_nbytes) == whole.data


@settings(deadline=None, max_examples=100)
@given(tilings(), st.data())
def test_a_box_left_out_is_a_gap_and_one_twice_is_used_once(tiling, data):
    shape, boxes = tiling
    assume(shape)
    boxes = [box for box in boxes if math.prod(box[1])]
    twice = whole_tensors(layouts_of("F32", shape, [*boxes, *boxes], 2), {"w"})["w"]
    assert len(twice.boxes) == len(boxes)
    lost = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
    boxes.append((lost[0], (0,) * len(shape)))
    with pytest.raises(DamagedError, match=rf"'w'.*{math.prod(lost[1])} of .* in no file"):
        whole_tensors(layouts_of("F32", shape, boxes), {"w"})


def test_a_tied_name_has_on_each_rank_what_its_holder_has_there():
    """b is a on rank 0, and on rank 1, which has no a, a tensor of its own."""
    a, b = (("F32", (4,), (at,), (2,)) for at in (0, 2))
    ranks = [layout(0, 2, [("a", *a)], aliases={"b": "a"}), layout(1, 2, [("b", *b)])]
    assert [(box.file, box.offsets) for box in whole_tensors(ranks, {"b"})["b"].boxes] == [(0, (0,)), (1, (2,))]
    ranks[1] = layout(1, 2, [("a", *b)], aliases={"b": "a"})
    tensors = whole_tensors(ranks, {"a", "b"})
    assert tensors["a"] is tensors["b"]
    ranks[1] = layout(1, 2, [], aliases={"b": "a"})
    with pytest.raises(DamagedError, match=r"r00001.*'b' is tied to 'a', which is not there"):
        whole_tensors(ranks, {"b"})


def test_an_overlap_names_tensor_boxes_and_files():
    boxes = [((0, 0), (2, 4)), ((1, 0), (3, 4))]
    with pytest.raises(DamagedError, match=r"'w': \[0:2, 0:4\] in r00000.* and \[1:4, 0:4\] in r00001.* overlap"):
        whole_tensors(layouts_of("F32", (4, 4), boxes, 2), {"w"})


def test_ranks_that_disagree_are_named():
    ranks = [layout(0, 2, [("w", "F32", (4,), (0,), (4,))]), layout(1, 2, [("w", "BF16", (4,), (0,), (4,))])]
    with pytest.raises(DamagedError, match=r"'w': F32 \[4\] in r00000.*BF16 \[4\] in r00001"):
        whole_tensors(ranks, {"w"})


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5)])
def test_nothing_is_whole(shape):
    tensor = whole_tensors(layouts_of("F32", shape, [((0,) * len(shape), shape)]), {"w"})["w"]
    assert (tensor.nbytes, list(batches([Target(tensor, 0, 0, "F32")]))) == (0, [])


def test_files_are_gone_through_once_side_by_side():
    """Tensors in rows and one in columns over two ranks, outputs in another order."""
    rows = 3 * BLOCK_NBYTES // 2
    ranks = []
    for rank in range(2):
        a = ("a", "U8", (2 * rows,), (rank * rows,), (rows,))
        c = ("c", "U8", (4096, 8192), (0, rank * 4096), (4096, 4096))
        b = ("b", "U8", (200,), (rank * 100,), (100,))
        ranks.append(layout(rank, 2, [a, c, b]))
    tensors = whole_tensors(ranks, {"a", "b", "c"})
    starts = {"b": 0, "c": 4096, "a": 1 << 26}
    targets = [Target(tensors[name], 0, start, "U8") for name, start in starts.items()]
    blocks = [min(p.start for p in batch[0].parts) // BLOCK_NBYTES for batch in batches(targets)]
    assert blocks == sorted(blocks)
    pieces = list(itertools.chain.from_iterable(batches(targets)))
    assert sum(piece.nbytes for piece in pieces) == sum(tensor.nbytes for tensor in tensors.values())
    seen = list(dict.fromkeys((p.file, p.start // BLOCK_NBYTES) for piece in pieces for p in piece.parts))
    assert seen == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]


def test_many_boxes_are_checked_in_a_moment():
    ranks = [layout(rank, 20_000, [("w", "F32", (8, 20_000), (0, rank), (8, 1))]) for rank in range(20_000)]
    assert len(whole_tensors(ranks, {"w"})["w"].boxes) == 20_000


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 9), st.integers(0, 30))
def test_runs_are_placed_as_loops_say(count, run, at, gap):
    stride = run + gap
    source = bytes(i % 251 for i in range(count * run))
    out, expected = bytearray(at + count * stride), bytearray(at + count * stride)
    for i in range(count):
        expected[at + i * stride : at + i * stride + run] = source[i * run : (i + 1) * run]
    write.scatter(Part(0, 0, len(source), at, run, ((count, stride),)), memoryview(source), memoryview(out))
    assert out == expected
