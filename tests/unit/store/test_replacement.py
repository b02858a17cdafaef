"""A file that a repair writes: nobody sees it before it is complete, and nothing is left of one that failed."""

import os

import pytest

from ckptd.store.posix.replacement import PosixReplacement
from ckptd.system.files import FileLayer


def descriptors() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


def test_a_replacement_that_cannot_be_made_leaves_neither_file_nor_descriptor(tmp_path):
    path = tmp_path / "image"
    path.write_bytes(b"damaged")
    before = descriptors()
    with pytest.raises(OSError, match="Invalid argument"):  # of ftruncate
        PosixReplacement(FileLayer(str(tmp_path)), str(path), -1)
    assert os.listdir(tmp_path) == ["image"]
    assert descriptors() == before


def test_a_replacement_is_read_again_before_it_takes_the_place(tmp_path):
    path = tmp_path / "image"
    path.write_bytes(b"damaged")
    before = descriptors()
    replacement = PosixReplacement(FileLayer(str(tmp_path)), str(path), 6)
    replacement.write(memoryview(b"sound"), 1)
    found = memoryview(bytearray(6))
    replacement.read(found, 0)
    assert bytes(found) == b"\0sound"
    with pytest.raises(EOFError, match="ends at byte 6"):
        replacement.read(memoryview(bytearray(2)), 5)
    assert path.read_bytes() == b"damaged"
    replacement.publish()
    replacement.close()
    replacement.close()
    assert path.read_bytes() == b"\0sound"
    assert os.listdir(tmp_path) == ["image"]
    assert descriptors() == before


def test_a_file_that_cannot_be_written_leaves_no_temporary_one(tmp_path):
    class Full(FileLayer):
        def fsync(self, fd: int) -> None:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        Full(str(tmp_path)).write_temp(str(tmp_path / "record"), b"x")
    assert os.listdir(tmp_path) == []
