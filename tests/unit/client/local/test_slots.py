"""This rank's mappings: of the file that lies there now, never of one that had its name."""

import errno
import os

import pytest

from ckptd_client._local import slots as _slots
from ckptd_client._local.slots import Slots

NAME = "r00000-000001.slot"
SIZE = 8192


def put(directory, fill: bytes, name=NAME):
    """A new file of that name, as a daemon makes it."""
    path = os.path.join(directory, name)
    if os.path.exists(path):
        os.unlink(path)
    with open(path, "wb") as file:
        file.write(fill * SIZE)
    return path


def test_a_slot_whose_name_was_used_again_is_mapped_again(tmp_path):
    slots = Slots(str(tmp_path))
    put(tmp_path, b"a")
    slots.grant(NAME, SIZE)
    slots.take(NAME).memory[:3] = b"old"
    path = put(tmp_path, b"b")
    slots.grant(NAME, SIZE)
    slots.take(NAME).memory[:3] = b"new"
    with open(path, "rb") as file:
        assert file.read(4) == b"newb"
    slots.close()


def test_a_slot_whose_file_is_gone_is_not_written(tmp_path):
    slots = Slots(str(tmp_path))
    path = put(tmp_path, b"a")
    slots.grant(NAME, SIZE)
    slots.map(NAME)
    os.unlink(path)
    with pytest.raises(FileNotFoundError):
        slots.take(NAME)


def test_a_slot_that_cannot_be_mapped_stays_granted(tmp_path, monkeypatch):
    slots = Slots(str(tmp_path))
    put(tmp_path, b"a")
    slots.grant(NAME, SIZE)

    def refuse(path):
        raise OSError(errno.EMFILE, "too many open files", path)

    with monkeypatch.context() as patch:
        patch.setattr(_slots, "SlotMap", refuse)
        with pytest.raises(OSError, match="too many"):
            slots.take(NAME)
    assert slots.fitting(SIZE) == NAME
    assert slots.take(NAME).capacity == SIZE
    slots.close()


def test_memory_of_slots_that_are_too_small_is_released(tmp_path):
    slots = Slots(str(tmp_path))
    path = put(tmp_path, b"a")
    slots.grant(NAME, SIZE)
    slots.map(NAME)
    slots.unmap_below(SIZE)
    with open("/proc/self/maps", encoding="ascii") as maps:
        assert path in maps.read()
    slots.unmap_below(SIZE + 1)
    with open("/proc/self/maps", encoding="ascii") as maps:
        assert path not in maps.read()
