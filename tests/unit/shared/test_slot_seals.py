"""The two seal pages: the younger valid one counts, whatever happened to the other."""

import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.shared.base.errors import DamagedError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.digest import BLOCK_NBYTES
from ckptd.shared.format.slot import (
    PAGE,
    SEAL_NBYTES,
    SEALS_NBYTES,
    Seal,
    SlotState,
    decode_seals,
    encode_seal,
    next_seal,
    slot_capacity,
)
from tests.runs import RUN

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"
KEY = JobKey("/store/runs", "llama-7b")
SEAL = Seal(
    state=SlotState.DIGESTED, job=KEY, save=SaveId(3, 7, 100, RUN), rank=5, world_size=8, image_nbytes=123456,
    header_nbytes=4096, layout_nbytes=321, leaves_nbytes=99, layout_digest=bytes(range(16)),
    leaves_digest=bytes(range(16, 32)), table_digest=bytes(range(32, 48)),
)  # fmt: skip
EMPTY = bytes(SEALS_NBYTES)


def put(pages, seal):
    offset, page = next_seal(pages, seal)
    return pages[:offset] + page + pages[offset + len(page) :]


def numbered(counter):
    return Seal(state=SlotState.SEALED, job=KEY, save=SaveId(1, counter, counter, RUN))


def test_pages_of_every_release_are_read():
    """For ever: a slot outlives an upgrade of the daemon."""
    page = bytes.fromhex((GOLDEN / "seal-v4.hex").read_text())
    assert decode_seals(page + bytes(SEAL_NBYTES)) == (0, 41, SEAL)


def test_the_bytes_of_today():
    assert encode_seal(SEAL, 41) == bytes.fromhex((GOLDEN / "seal-v4.hex").read_text())


def test_a_sealed_page_of_another_version_is_refused_and_both_are_named():
    """It would be read with less in it, or taken for a free slot and written over."""
    page = bytes.fromhex((GOLDEN / "seal-v3.hex").read_text())
    for pages in (page + bytes(SEAL_NBYTES), bytes(SEAL_NBYTES) + page):
        with pytest.raises(DamagedError, match=r"^slot s: its seal is of version 3, this program reads 4") as caught:
            decode_seals(pages, where="slot s")
        assert "ckptd drain --wait" in caught.value.hint
        with pytest.raises(DamagedError, match="version 3"):
            next_seal(pages, SEAL)
    torn = page[:100] + b"\xff" + page[101:]
    assert decode_seals(torn + bytes(SEAL_NBYTES))[2] == Seal()


def test_a_free_slot_of_another_version_is_free():
    from ckptd.shared.format.digest import digest  # noqa: PLC0415

    head = encode_seal(Seal(), 7)[:-16].replace(b"CKPTDSL4", b"CKPTDSL3")
    pages = head + digest(head) + bytes(SEAL_NBYTES)
    assert decode_seals(pages)[2] == Seal()
    assert decode_seals(put(pages, SEAL))[2] == SEAL


def test_nothing_valid_is_a_free_slot():
    assert decode_seals(EMPTY)[2].state is SlotState.FREE
    assert decode_seals(b"\xff" * SEALS_NBYTES)[2].state is SlotState.FREE


def test_pages_alternate_and_the_one_in_force_is_never_touched():
    pages, at = EMPTY, []
    for counter in range(1, 6):
        offset, page = next_seal(pages, numbered(counter))
        at.append(offset)
        assert len(page) == SEAL_NBYTES
        pages = put(pages, numbered(counter))
        assert decode_seals(pages)[1:] == (counter, numbered(counter))
    assert at == [0, PAGE, 0, PAGE, 0]


@given(cut=st.integers(0, SEAL_NBYTES - 1), counter=st.integers(1, 4))
def test_a_write_that_was_torn_leaves_the_former_seal_in_force(cut, counter):
    pages = EMPTY
    for number in range(1, counter + 1):
        pages = put(pages, numbered(number))
    offset, page = next_seal(pages, SEAL)
    torn = pages[:offset] + page[:cut] + pages[offset + cut :]
    found = decode_seals(torn)[2]
    assert found == numbered(counter) or (found == SEAL and torn[offset : offset + PAGE] == page)


@given(bit=st.integers(0, SEAL_NBYTES * 8 - 1))
def test_any_flipped_bit_is_found(bit):
    page = bytearray(encode_seal(SEAL, 2))
    page[bit // 8] ^= 1 << bit % 8
    assert decode_seals(bytes(page) + bytes(SEAL_NBYTES))[2] == Seal()
    older = encode_seal(numbered(1), 1)
    assert decode_seals(older + bytes(page)) == (0, 1, numbered(1))


def test_every_byte_flipped_is_found():
    page = encode_seal(SEAL, 2)
    for index in range(SEAL_NBYTES):
        broken = page[:index] + bytes([page[index] ^ 0x40]) + page[index + 1 :]
        assert decode_seals(broken + bytes(SEAL_NBYTES))[1] == 0


def test_a_valid_digest_over_nonsense_is_no_seal():
    from ckptd.shared.format.digest import digest  # noqa: PLC0415

    for head in (b"CKPTDSL4" + (9).to_bytes(8, "little") + (5000).to_bytes(4, "little"), b"CKPTDSL9", b""):
        page = head.ljust(SEAL_NBYTES - 16, b"\0")
        assert decode_seals((page + digest(page)) * 2)[2] == Seal()


@pytest.mark.parametrize("words", [{"rank": -1}, {"image_nbytes": -1}, {"world_size": 0}, {"layout_digest": b"short"}])
def test_a_seal_with_impossible_numbers_is_no_seal(words):
    page = encode_seal(Seal(state=SlotState.SEALED, job=KEY, save=SaveId(1, 1, 1, RUN), **words), 3)
    assert decode_seals(page + bytes(SEAL_NBYTES))[2] == Seal()


def test_a_seal_that_does_not_fit_its_page_is_refused():
    with pytest.raises(DamagedError):
        encode_seal(Seal(job=JobKey("/" + "x" * 5000, "j")), 1)


def test_the_longest_names_fit():
    encode_seal(Seal(state=SlotState.SEALED, job=JobKey("/" + "é" * 1023, "j" * 64), save=SaveId(1, 1, 1, RUN)), 2**63)


@given(st.integers(0, 5 * BLOCK_NBYTES), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6))
def test_a_segment_fits_the_capacity_made_for_it(image, layout, leaves, objects):
    seal = Seal(image_nbytes=image, layout_nbytes=layout, leaves_nbytes=leaves, objects_nbytes=objects)
    capacity = slot_capacity(image, layout, leaves + objects)
    ends = [part.offset + part.nbytes for part in seal.tail.values()]
    assert [part.offset for part in seal.tail.values()] == [seal.table_offset, *ends[:-1]]
    assert ends[-1] == seal.content_nbytes
    assert capacity % PAGE == 0
    assert seal.content_nbytes + SEALS_NBYTES <= capacity < seal.content_nbytes + SEALS_NBYTES + 2 * PAGE
    assert seal.table_offset % PAGE == 0
