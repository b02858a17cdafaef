"""``ckptd status --watch`` on a real pseudo-terminal, with a real daemon: what the terminal is sent, byte by byte."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest

from tests.cluster import ROOT, Node, wait_for

ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"
BEGIN, END = b"\x1b[?2026h", b"\x1b[?2026l"


# Whoever runs the tests in the background may ignore SIGINT, which children inherit.
pytestmark = pytest.mark.process


_WATCH = ("env", "--default-signal=INT", sys.executable, "-m", "ckptd", "status", "--watch")


class Terminal:
    """A pseudo-terminal of a size, and the command that runs on it."""

    def __init__(self, node: Node, *flags: str, columns: int = 80, rows: int = 24, **environ: str) -> None:
        self.ours, theirs = pty.openpty()
        self.resize(columns, rows)
        self.said = b""
        clean = {k: v for k, v in node.environ().items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [*_WATCH, "--interval", "0.3", *flags],
            env=clean | {"TERM": "xterm-256color", "CKPTD_STORE": ""} | environ,
            cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self) -> bytes:
        """All that was said so far."""
        while select.select([self.ours], [], [], 0)[0]:
            try:
                data = os.read(self.ours, 1 << 16)
            except OSError:  # the other end is closed
                break
            if not data:
                break
            self.said += data
        return self.said

    def frames(self) -> list[bytes]:
        return re.findall(re.escape(BEGIN) + b"(.*?)" + re.escape(END), self.read(), re.DOTALL)

    def end(self, number: signal.Signals) -> bytes:
        self.process.send_signal(number)
        self.process.wait(60)
        return self.read()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)
        os.close(self.ours)


def rows_of(frame: bytes) -> list[str]:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", frame.decode()).split("\r\n")


@pytest.fixture(name="node", scope="module")
def fixture_node(tmp_path_factory):
    with Node(str(tmp_path_factory.mktemp("store"))) as node:
        node.start(CKPTD_NODE="node07")
        yield node


@pytest.fixture(name="on")
def fixture_on(node):
    opened = []

    def open_(*flags, **options):
        opened.append(Terminal(node, *flags, **options))
        return opened[-1]

    yield open_
    for terminal in opened:
        terminal.close()


def test_a_frame_is_drawn_over_the_last_and_nothing_is_cleared_before(on):
    terminal = on()
    wait_for(lambda: len(terminal.frames()) >= 3)
    said = terminal.end(signal.SIGINT)
    assert said.startswith(ENTER)
    assert terminal.process.returncode == 0
    frames = terminal.frames()
    assert all(frame.startswith(b"\x1b[H") and frame.endswith(b"\x1b[J") for frame in frames)
    assert b"\x1b[2J" not in said
    assert rows_of(frames[0])[0].startswith("ckptd ")
    assert "node07" in rows_of(frames[0])[0]
    assert said.count(ENTER) == said.count(LEAVE) == 1
    assert said.count(b"\x1b[?25l") == said.count(b"\x1b[?25h") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_however_it_ends_the_terminal_is_as_before_and_the_last_picture_stays(on, number):
    terminal = on()
    wait_for(terminal.frames)
    said = terminal.end(number)
    assert b"Traceback" not in said
    after = said[said.index(LEAVE) + len(LEAVE) :]
    assert b"\x1b[?25h" in said
    assert b"node07" in after
    assert terminal.process.returncode == 0


def test_another_size_is_drawn_at_once_and_what_does_not_fit_is_counted(on):
    terminal = on("--interval", "30", columns=120, rows=40)
    wait_for(terminal.frames)
    before = len(terminal.frames())
    terminal.resize(50, 4)
    terminal.process.send_signal(signal.SIGWINCH)
    began = time.monotonic()
    wait_for(lambda: len(terminal.frames()) > before)
    assert time.monotonic() - began < 5
    rows = rows_of(terminal.frames()[-1])
    assert len(rows) == 4
    assert max(map(len, rows)) <= 50
    assert "more lines" in rows[-1]


def test_a_daemon_that_is_killed_is_waited_for(on, node):
    terminal = on()
    wait_for(terminal.frames)
    node.kill()
    wait_for(lambda: b"looking again every 0.3 s" in terminal.frames()[-1])
    node.start(CKPTD_NODE="node07")
    wait_for(lambda: b"node07" in terminal.frames()[-1])
    assert terminal.process.poll() is None


def test_no_color_has_no_colour_and_a_dumb_terminal_no_escape(on):
    terminal = on(NO_COLOR="1")
    wait_for(terminal.frames)
    assert not re.search(rb"\x1b\[[0-9;]*3[0-9]m", terminal.end(signal.SIGINT))
    terminal = on(TERM="dumb")
    wait_for(lambda: terminal.read().count(b"node07") >= 2)
    assert b"\x1b" not in terminal.end(signal.SIGINT)
    assert terminal.process.returncode == 0


def test_in_a_pipe_a_picture_per_interval_and_no_escape(node):
    process = subprocess.Popen(
        [*_WATCH, "--interval", "0.2"],
        env=node.environ(PYTHONUNBUFFERED="1") | {"CKPTD_STORE": ""}, cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    lines = [process.stdout.readline() for _ in range(16)]
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=120)[0]
    assert process.returncode == 0
    assert sum(line.startswith("ckptd ") for line in lines) >= 2
    assert "\x1b" not in "".join(lines) + rest
    assert not any(line.rstrip("\n").endswith(" ") for line in lines)
