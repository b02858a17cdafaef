"""What lies between a daemon and its peers: a relay that can cut, hold, stall, flip a bit, repeat and remember."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable

_CHUNK_NBYTES = 1 << 16
_HELD_S = 0.01
_TARGET_S = 5.0

Change = Callable[[bytes], bytes]


class Channel:
    """One port that leads to one port of the daemon. Its threads end with ``close``."""

    def __init__(self, path: str) -> None:
        self._path = path  # of the file in which the daemon says its port
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._closed = False
        self.opened = True  # else whoever connects is hung up on
        self.held = False  # nothing gets through, and nobody is told
        self.to_daemon: Change | None = None
        self.from_daemon: Change | None = None
        self.said: list[bytearray] = []  # to the daemon, by connection
        self.asked = 0  # bytes that peers have said, let through or not
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Every connection that there is ends with a reset."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for one in (one for pair in pairs for one in pair):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def connect(self) -> socket.socket:
        """To the daemon, past the relay."""
        deadline = time.monotonic() + _TARGET_S
        while True:
            with contextlib.suppress(OSError, ValueError):
                with open(self._path, encoding="ascii") as file:
                    port = int(file.read())
                return socket.create_connection(("127.0.0.1", port), _TARGET_S)
            if time.monotonic() > deadline:
                raise ConnectionRefusedError(self._path)
            time.sleep(_HELD_S)

    def close(self) -> None:
        """Ends."""
        self._closed = True
        self.held = False
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while not self._closed:
            try:
                theirs = self._listener.accept()[0]
            except OSError:
                return
            if self.opened:
                threading.Thread(target=self._join, args=(theirs,), daemon=True).start()
            else:
                theirs.close()

    def _join(self, theirs: socket.socket) -> None:
        try:
            ours = self.connect()
        except OSError:
            theirs.close()
            return
        ours.settimeout(None)
        said = bytearray()
        with self._lock:
            self._pairs.append((theirs, ours))
            self.said.append(said)
        back = threading.Thread(target=self._pump, args=(ours, theirs, None), daemon=True)
        back.start()
        self._pump(theirs, ours, said)
        back.join()
        theirs.close()
        ours.close()

    def _pump(self, source: socket.socket, target: socket.socket, said: bytearray | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK_NBYTES):
                self.asked += len(data) if said is not None else 0
                while self.held:
                    time.sleep(_HELD_S)
                change = self.from_daemon if said is None else self.to_daemon
                if said is not None:
                    said += data
                target.sendall(change(data) if change is not None else data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


class Relay:
    """Both ports of a daemon: what peers say to it, and the bytes that they fetch from it."""

    def __init__(self, directory: str, name: str) -> None:
        self._prefix = os.path.join(directory, f"relay-{name}-")
        self.control = Channel(f"{self._prefix}control")
        self.bulk = Channel(f"{self._prefix}bulk")

    @property
    def program(self) -> list[str]:
        """How a daemon is started behind it."""
        script = os.path.join(os.path.dirname(__file__), "relayed.py")
        return [script, str(self.control.port), str(self.bulk.port), self._prefix]

    def forget(self) -> None:
        """Another daemon will come."""
        for path in (f"{self._prefix}control", f"{self._prefix}bulk"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def cut(self) -> None:
        """Every connection ends; the next ones are let through."""
        self.control.cut()
        self.bulk.cut()

    def open(self, wide: bool) -> None:
        """Whether anybody gets through."""
        self.control.opened = self.bulk.opened = wide
        if not wide:
            self.cut()

    def close(self) -> None:
        """Ends both."""
        self.control.close()
        self.bulk.close()


class Stall:
    """Lets so many bytes through, then nothing: the channel is held. Once."""

    def __init__(self, channel: Channel, after_nbytes: int) -> None:
        self._channel, self._left = channel, after_nbytes

    def __call__(self, data: bytes) -> bytes:
        """What goes on."""
        before, self._left = self._left, self._left - len(data)
        if before > 0 >= self._left:
            self._channel.held = True
        return data


class Flip:
    """Turns one bit of what passes, behind so many bytes; once."""

    def __init__(self, after_nbytes: int) -> None:
        self._left = after_nbytes
        self.done = False

    def __call__(self, data: bytes) -> bytes:
        """What goes on."""
        place, self._left = self._left, self._left - len(data)
        if self.done or not 0 <= place < len(data):
            return data
        self.done = True
        return data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]


class Repeat:
    """Sends one frame of a ZeroMQ connection twice: the last whole one of a chunk that ends with it. Once."""

    def __init__(self, at_least_nbytes: int = 100) -> None:
        self._at_least = at_least_nbytes
        self.done = False

    def __call__(self, data: bytes) -> bytes:
        """What goes on."""
        if self.done or len(data) < self._at_least or data[0] & ~0x07:
            return data
        long = data[0] & 0x02
        size = int.from_bytes(data[1:9] if long else data[1:2], "big") + (9 if long else 2)
        if size != len(data):
            return data
        self.done = True
        return data + data
