"""Blocks of an arena read again: damage is found wherever it is, and never where a slot is given away meanwhile."""

import os
import tempfile
import threading
import time

import pytest

from ckptd.arena.arena import Arena
from ckptd.parity.encode import encode
from ckptd.parity.scrub import GONE, look_at_parity, look_at_slot
from ckptd.parity.streams import TAIL
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.digest import BLOCK_NBYTES, block_count, digest
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.format.slot import Seal, SlotState
from tests.flips import flip
from tests.nodes import EPOCH, SAVE, noise, start_set
from tests.nodes import KEY as SET_KEY
from tests.runs import RUN
from tests.slots import some_tensors, write_slot

KEY = JobKey("/store", "job")
ONE = SaveId(1, 1, 10, RUN)
NBYTES = 3 * BLOCK_NBYTES + 5000


@pytest.fixture
def directory():
    with tempfile.TemporaryDirectory(prefix="ckptd-test-", dir="/dev/shm") as path:
        yield path


@pytest.fixture
def arena(directory):
    made = Arena(os.path.join(directory, "arena"))
    made.open()
    yield made
    made.close(remove=False)


def a_slot(arena, nbytes=NBYTES):
    arena.reserve(0, 1, NBYTES + 64 * 4096)
    name = arena.allocate(KEY, 0, NBYTES + 64 * 4096)
    slot = write_slot(arena.slot_path(KEY, name), KEY, ONE, some_tensors(nbytes))
    return name, slot


def looks(arena, name, save=ONE):
    """All blocks, from the tail to the last."""
    found = [look_at_slot(arena, KEY, name, save, TAIL)]
    while not found[-1].last and not found[-1].gone:
        found.append(look_at_slot(arena, KEY, name, save, len(found) - 1))
    return found


def test_every_block_is_read_once(arena):
    name, slot = a_slot(arena)
    found = looks(arena, name)
    assert len(found) == 1 + block_count(len(slot.image))
    assert sum(look.nbytes for look in found[1:]) == len(slot.image)
    assert not any(look.damage or look.gone for look in found)
    assert look_at_slot(arena, KEY, name, ONE, 99).last


@pytest.mark.parametrize("block", [TAIL, 0, 2, 3])
def test_a_flipped_bit_is_found_in_its_block_alone(arena, block):
    name, slot = a_slot(arena)
    flip(slot.path, slot.seal.layout_offset + 3 if block == TAIL else block * BLOCK_NBYTES + 2000)
    found = looks(arena, name)
    assert [number - 1 for number, look in enumerate(found) if look.damage] == [block]
    assert name in found[block + 1].damage


def test_a_flipped_bit_in_the_digests_is_the_tails(arena):
    name, slot = a_slot(arena)
    flip(slot.path, slot.seal.table_offset + 3)
    assert "digest table" in look_at_slot(arena, KEY, name, ONE, TAIL).damage


def test_what_is_not_there_is_no_damage(arena):
    name, slot = a_slot(arena)
    assert look_at_slot(arena, KEY, name, SaveId(1, 2, 20, RUN), 0) == GONE
    assert look_at_slot(arena, KEY, "r00000-000099.slot", ONE, 0) == GONE
    flip(slot.path, 2000)
    arena.free(KEY, name)
    assert look_at_slot(arena, KEY, name, ONE, 0) == GONE
    arena.unlink(KEY, name)
    assert look_at_slot(arena, KEY, name, ONE, 0) == GONE


class Writer(threading.Thread):
    """Takes one slot from save to save as a daemon and a rank do: free it, then overwrite it, seal it, digest it."""

    def __init__(self, arena, name, nbytes):
        super().__init__()
        self.arena, self.name, self.nbytes = arena, name, nbytes
        self.saves = [ONE]
        self.over = False

    def run(self):
        view = self.arena.view(KEY, self.name)
        while not self.over:
            save = SaveId(1, len(self.saves) + 1, 10, RUN)
            self.arena.free(KEY, self.name)
            view[: self.nbytes] = bytes([len(self.saves) % 251 + 1]) * self.nbytes
            nothing = digest(b"")
            seal = Seal(
                state=SlotState.SEALED, job=KEY, save=save, rank=0, world_size=1, image_nbytes=self.nbytes,
                layout_digest=nothing, leaves_digest=nothing, table_digest=bytes(16), objects_digest=bytes(16),
            )  # fmt: skip
            self.arena.seal(KEY, self.name, seal)
            self.arena.seal_digests(KEY, self.name, self.arena.digests(KEY, self.name, save))
            self.saves.append(save)
            time.sleep(0.002)  # a save lies for a while


def test_a_slot_that_goes_from_save_to_save_is_never_damaged(arena):
    """The writer never waits for the reader, which reads what it was told of a moment ago."""
    nbytes = 8 << 20
    name, _ = a_slot(arena)
    writer = Writer(arena, name, nbytes)
    writer.start()
    found, until = [], time.monotonic() + 3.0
    try:
        while time.monotonic() < until or len(writer.saves) < 20:
            save = writer.saves[-1]
            found.append((save, look_at_slot(arena, KEY, name, save, 0)))
            found.append((save, look_at_slot(arena, KEY, name, save, TAIL)))
    finally:
        writer.over = True
        writer.join()
    assert [(save, look.damage) for save, look in found if look.damage] == []
    assert sum(look.gone for _, look in found) > 10, "it was read while it was given away"
    assert sum(not look.gone for _, look in found) > 10, "and while it was not"


def a_set(directory):
    made = start_set(directory, 3)
    made.stage([[noise(str(i), 300_000)] for i in range(3)])
    return made


def test_parity_is_read_like_a_slot(directory):
    made = a_set(directory)
    node = made.nodes[0]
    try:
        encode(node.parities, SET_KEY, made.parity_chunk(0, Scheme.XOR, EPOCH), made.sources(node), lambda _: None)
        look = look_at_parity(node.arena, SET_KEY, SAVE, EPOCH, 0)
        assert (look.last, look.damage, look.gone) == (True, "", False)
        assert look.nbytes > 100_000
        (name,) = node.arena.sizes(SET_KEY, ".parity")
        view = node.arena.view(SET_KEY, name)
        for at in (1000, look.nbytes + 10):
            view[at] ^= 4
            assert look_at_parity(node.arena, SET_KEY, SAVE, EPOCH, 0).damage
            view[at] ^= 4
        assert look_at_parity(node.arena, SET_KEY, SAVE, EPOCH + 1, 0) == GONE
        view[1000] ^= 4
        node.parities.give_back(SET_KEY, SAVE, EPOCH)
        assert look_at_parity(node.arena, SET_KEY, SAVE, EPOCH, 0) == GONE
    finally:
        made.stop()


def test_a_seal_that_came_back_is_another_one(arena, monkeypatch):
    """Parity that is made again for the same save has an equal seal: only its number tells."""
    name, slot = a_slot(arena)
    flip(slot.path, 2000)
    real = Arena.seal_of

    def meanwhile(self, job, one):
        seal = real(self, job, one)
        monkeypatch.setattr(Arena, "seal_of", real)
        arena.free(job, one)
        arena.seal(job, one, seal)
        return seal

    monkeypatch.setattr(Arena, "seal_of", meanwhile)
    assert look_at_slot(arena, KEY, name, ONE, 0) == GONE
