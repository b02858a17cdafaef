"""Memory that the process's page guard cannot have is copied before save returns, and is right."""

import time

import torch

from ckptd_client._local import late_memory
from ckptd_client._local.late_memory import LateMemory
from ckptd_client._local.page_guard import PageGuard, Range, whole_units
from tests.unit.client.save.test_late_proof import (
    late,  # noqa: F401 - a fixture
    pytestmark,  # noqa: F401 - a fixture
)
from tests.unit.client.save.writers import Victim


def saved_early(client, victim, *, saves=8):
    """Saves while the optimizer writes between; asserts that nothing is late and the last one is what was saved."""
    for _ in range(saves):
        expected = victim.large.detach().clone()
        client.save(victim.state).wait("staged", 60)
        assert client.stats().last_late_nbytes == 0
        victim.optimizer.step()
        time.sleep(0.05)  # for the thread that would put it together
    back = {name: torch.zeros_like(tensor) for name, tensor in victim.state.items()}
    client.load(back)
    assert torch.equal(back["large"], expected)


def of_large(victim):
    start = victim.large.data_ptr()
    return Range(start, start + victim.large.nbytes)


def test_memory_that_another_userfaultfd_watches_is_never_late(join):
    victim, other = Victim(), PageGuard()  # such as a debugger, a collector of garbage, or a library of migration
    units = whole_units([of_large(victim)])
    assert units
    for unit in units:
        other.register(unit)
    try:
        client = join()
        client.attach(victim.optimizer)
        saved_early(client, victim)
        assert client.stats().late.startswith("off: "), client.stats().late
    finally:
        for unit in units:
            other.unregister(unit)
        other.close()


def test_memory_beyond_the_bound_on_ranges_is_never_late(join, monkeypatch):
    monkeypatch.setattr(late_memory, "_MAX_RANGES", 0)
    monkeypatch.setattr(LateMemory, "_adjacent", lambda *_: 0)
    victim, client = Victim(), join()
    client.attach(victim.optimizer)
    saved_early(client, victim)
    assert client.stats().late.startswith("off: "), client.stats().late


def test_ranges_are_counted_up_to_the_bound(monkeypatch):
    monkeypatch.setattr(late_memory, "_MAX_RANGES", 2)
    memory = LateMemory(PageGuard())
    try:
        memory._ready, memory._ranges = {0}, 1
        assert memory._has_room(8 << 20)
        memory._ranges = 2
        assert not memory._has_room(8 << 20)
        assert memory._has_room(2 << 20)  # beside one that is there it costs no mapping
    finally:
        memory.guard.close()
