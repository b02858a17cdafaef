"""The seals of a parity file: one of another version is refused, and not taken for that of a free file."""

import pytest

from ckptd.parity import record
from ckptd.shared.base.errors import OtherVersionError
from ckptd.shared.base.ids import JobKey
from ckptd.shared.format.digest import DIGEST_NBYTES
from ckptd.shared.format.integrity import XXH3, Purpose
from ckptd.shared.format.slot import SEAL_NBYTES, SEALS_NBYTES

SEAL = record.ParitySeal(job=JobKey("/store", "demo"), nbytes=4096, record_nbytes=10, record_digest=bytes(16))


def pages_of(seal, version=record.VERSION):
    pages = bytearray(SEALS_NBYTES)
    record.put_seal(memoryview(pages), seal)
    head = bytes(pages[: SEAL_NBYTES - DIGEST_NBYTES]).replace(b"CKPTDPY%d" % record.VERSION, b"CKPTDPY%d" % version)
    return head + XXH3.digest(head, Purpose.PARITY_SEAL) + bytes(pages[SEAL_NBYTES:])


def test_a_seal_of_this_version_is_read():
    assert record.decode_seals(pages_of(SEAL))[2] == SEAL


def test_a_seal_of_another_version_is_refused_and_both_are_named():
    """It would be read with less in it, or taken for a free file and written over."""
    with pytest.raises(OtherVersionError, match=r"^parity p: its seal is of version 1, this program reads 2") as caught:
        record.decode_seals(pages_of(SEAL, 1), where="parity p")
    assert "ckptd drain --wait" in caught.value.hint


def test_a_free_file_of_another_version_is_free():
    assert record.decode_seals(pages_of(record.ParitySeal(), 1))[2] == record.ParitySeal()
