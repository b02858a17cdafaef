"""The page of a job of 10,000 nodes, of statuses that a coordinator's core and the daemon's status builder made."""

import fcntl
import functools
import os
import pty
import re
import struct
import termios
import threading
import time

import msgspec
import pytest
from rich.console import Console

from ckptd.cli.view.screen import watch
from ckptd.cli.view.status import StatusView
from ckptd.daemon import status as builder
from ckptd.shared.protocol.status import Status
from tests.long_form import in_long
from tests.situations import driven, page
from tests.unit.cli.test_screen import rows_of
from tests.unit.daemon.test_large_status import a_large_job

pytestmark = pytest.mark.seconds

NODES = 10_000
MOST_LINES, MOST_LINES_WITH_NODES = 30, 50
ROWS = 24
DRAW_S = 0.2  # of the processor, of each second that somebody watches


@functools.cache
def looked(name):
    """The statuses of two looks, a second apart, as they come over the socket."""
    if name == "lost":
        return (encoded(driven.thousand_nodes(NODES)),) * 2
    catalogue = a_large_job(drains=name == "drains")
    return tuple(encoded(driven.of_jobs(builder.jobs(catalogue.jobs, now, {}), "n00000")) for now in (1.0, 2.0))


def encoded(status):
    assert len(status.jobs[0].nodes) == NODES
    return msgspec.msgpack.encode(status)


def decoded(data):
    return msgspec.msgpack.decode(data, type=Status)


@pytest.mark.parametrize("name", ["quiet", "drains", *in_long("lost")])
def test_it_is_a_screen_high_and_rows_keep_their_places(name):
    plain = [page.rendered(decoded(data)).splitlines() for data in looked(name)]
    full = [page.rendered(decoded(data), nodes=True).splitlines() for data in looked(name)]
    print(name, len(plain[0]), len(full[0]))
    assert max(map(len, plain)) <= MOST_LINES
    assert max(map(len, full)) <= MOST_LINES_WITH_NODES
    for first, second in (plain, full):
        assert [label(line) for line in first] == [label(line) for line in second]
    assert plain[0][1].startswith("unsafe  nodes n")


def label(line):
    """What a line is of: without its figures, which may be others a second later."""
    return re.split(r"[0-9━─]", line.strip(), maxsplit=1)[0] if not line.startswith("  n") else line.split()[0]


@pytest.mark.parametrize("name", ["drains", *in_long("lost")])
@pytest.mark.parametrize("nodes", [False, True])
def test_a_look_costs_little(name, nodes):
    took = []
    for _ in range(5):
        began = time.thread_time()
        page.rendered(decoded(looked(name)[0]), nodes=nodes)
        took.append(time.thread_time() - began)
    print(name, nodes, [round(1000 * one) for one in took], "ms")
    assert min(took) < DRAW_S, took


@pytest.mark.parametrize("nodes", [False, True])
def test_a_terminal_of_24_rows_is_drawn_over_and_never_scrolls(nodes):
    frames = frames_of([StatusView(decoded(data), nodes=nodes) for data in looked("drains")])
    assert len(frames) == 2
    for frame in frames:
        rows = rows_of(frame)
        assert len(rows) == ROWS
        assert rows[1].startswith("unsafe  nodes n")
        assert re.fullmatch(r"\N{HORIZONTAL ELLIPSIS} [0-9]+ more lines: a taller terminal shows them", rows[-1])


def frames_of(views):
    """What a terminal gets while these are seen, one after the other."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, 80, 0, 0))
    said = bytearray()

    def read():
        while data := _read(ours):
            said.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(theirs, "w", encoding="utf-8") as file:
        watch(Console(file=file, force_terminal=True, highlight=False), _one_by_one(views), 0.05)
    reader.join(60)
    os.close(ours)
    return re.findall(rb"\x1b\[\?2026h(.*?)\x1b\[\?2026l", bytes(said), re.DOTALL)


def _one_by_one(views):
    left = list(views)

    def frame():
        if not left:
            raise KeyboardInterrupt
        return left.pop(0)

    return frame


def _read(descriptor):
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # the other end is closed
        return b""
