"""Slots whose pages take long to be touched: the first save waits for them, and says so where it cannot."""

import sys
import threading
import time

import pytest
import torch

from ckptd_client._daemon import link
from tests import pythons
from tests.cluster import Node, wait_for

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

STATE = {"w": torch.arange(1000)}
SLACK_S = 1.0
TIMEOUT_S = 0.5
SLOW_DAEMON = """
import sys, time
from ckptd.arena.arena import Arena
from ckptd.cli import main
plain, seconds = Arena.allocate, float(sys.argv.pop(1))
def allocate(*args, **named):
    time.sleep(seconds)
    return plain(*args, **named)
Arena.allocate = allocate
main()
"""


def start(node: Node, seconds: float) -> None:
    """A daemon for which each slot takes so long."""
    with open(node.log, "ab") as log:
        words = [sys.executable, "-P", "-c", SLOW_DAEMON, str(seconds), "run", "--arena", node.arena]
        node.daemon = pythons.Popen(words, env=node.environ() | {"CKPTD_STORE": ""}, stdout=log, stderr=log)
    wait_for(node.try_status)


@pytest.fixture(name="patient")
def fixture_patient(monkeypatch):
    """The slots of STATE may take a minute or more."""
    monkeypatch.setattr(link, "_ALLOCATED_PER_S", 100.0)


@pytest.mark.usefixtures("patient")
def test_the_first_save_waits_for_slots_that_are_on_their_way(node, join):
    start(node, 1.5)
    client = join(save_timeout_s=TIMEOUT_S)
    handle = client.save(STATE, 1)
    assert handle.end != "skipped", handle.reason
    assert handle.stall_s > TIMEOUT_S
    assert handle.wait("durable", 60).step == 1
    client.prepare(STATE)  # the other slots come after the first
    assert client.save(STATE, 2).stall_s < TIMEOUT_S


@pytest.mark.usefixtures("patient")
def test_a_second_save_that_finds_no_slot_says_that_its_memory_is_on_its_way(node, join):
    start(node, 1.5)
    client = join(save_timeout_s=TIMEOUT_S, drain_every=1000)
    client.save(STATE, 1)
    handle = client.save(STATE, 2)
    assert handle.end == "skipped"
    assert "memory of its slots is still being allocated" in handle.reason


@pytest.mark.usefixtures("patient")
def test_a_load_has_slow_memory_made_before_the_first_save(node, join):
    start(node, 1.0)
    client = join(save_timeout_s=TIMEOUT_S)
    assert client.load(STATE) is None
    time.sleep(1 + SLACK_S)  # training
    handle = client.save(STATE, 1)
    assert handle.stall_s < TIMEOUT_S, handle
    assert handle.wait("durable", 60).step == 1


@pytest.mark.usefixtures("patient")
def test_a_first_slot_is_made_before_the_second_ones_of_others(node, join):
    start(node, 2.0)
    early, late = join("early"), join("late")
    saving = threading.Thread(target=early.save, args=(STATE, 1))
    saving.start()
    wait_for(lambda: early._link.capacity)
    assert late.save(STATE, 1).stall_s < 5  # behind the first slot of the other: its second and third would make it 8
    saving.join(20)
    assert not saving.is_alive()


@pytest.mark.usefixtures("patient")
def test_a_state_that_grew_waits_for_its_larger_slots(node, join):
    start(node, 1.0)
    client = join(save_timeout_s=TIMEOUT_S)
    client.prepare(STATE)
    handle = client.save({"w": torch.arange(100_000)}, 1)
    assert handle.stall_s > TIMEOUT_S
    assert handle.wait("durable", 60).step == 1


def test_memory_that_takes_too_long_is_named_as_the_reason(node, join):
    start(node, 4.0)
    client = join(save_timeout_s=TIMEOUT_S)
    began = time.monotonic()
    handle = client.save(STATE, 1)
    assert time.monotonic() - began < TIMEOUT_S + SLACK_S
    assert handle.end == "skipped"
    assert "memory of its slots is still being allocated" in handle.reason
    assert "prepare(state)" in handle.reason
    client.prepare(STATE)
    assert client.save(STATE, 2).wait("durable", 60).step == 2


@pytest.mark.usefixtures("patient")
def test_slots_that_hold_checkpoints_are_no_memory_that_comes(node, join):
    node.start("--slots-per-rank", "2")
    client = join(save_timeout_s=TIMEOUT_S)
    client.prepare(STATE)
    for name in list(client._link.slots.granted):
        client._link.slots.withdraw(name)
    began = time.monotonic()
    handle = client.save(STATE, 1)
    assert time.monotonic() - began < TIMEOUT_S + SLACK_S
    assert handle.end == "skipped"
    assert "no slot was free within 0.5 s" in handle.reason


@pytest.mark.usefixtures("patient")
def test_a_daemon_that_ends_meanwhile_is_seen_at_once(node, join):
    start(node, 30.0)
    client = join(save_timeout_s=TIMEOUT_S)
    killer = threading.Timer(1.0, node.kill)
    killer.start()
    began = time.monotonic()
    handle = client.save(STATE, 1)
    killer.join()
    assert handle.end == "failed"
    assert "the daemon ended" in handle.reason
    assert 0.9 < time.monotonic() - began < 1 + SLACK_S
