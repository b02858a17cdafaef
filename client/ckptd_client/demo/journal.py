"""The journal of a rank, a file that outlives it: one JSON line per record, appended, never rewritten."""

import os

import msgspec


class Loss(msgspec.Struct, frozen=True, tag="loss"):
    """Mean loss of one step over all ranks, exact: the float's hexadecimal form."""

    step: int
    loss: str


class Saved(msgspec.Struct, frozen=True, tag="saved"):
    """A save returned to the training loop after stall_s."""

    step: int
    stall_s: float


class Reached(msgspec.Struct, frozen=True, tag="reached"):
    """A checkpoint reached a milestone, seconds after its save began."""

    step: int
    milestone: str
    seconds: float


class Restored(msgspec.Struct, frozen=True, tag="restored"):
    """The rank restored step from nbytes of tier."""

    step: int
    tier: str
    seconds: float
    nbytes: int


class TorchSaved(msgspec.Struct, frozen=True, tag="torch-saved"):
    """torch.save of the same state: seconds until it returned, and with fsync after it."""

    step: int
    nbytes: int
    seconds: float
    synced_s: float


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """All steps are done; digest covers the parameters and the optimizer's state."""

    digest: str


Record = Loss | Saved | Reached | Restored | TorchSaved | Finished

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


class Writer:
    """Appends records to a new file. Each is one write(2), so a SIGKILL leaves complete lines."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)

    def write(self, record: Record) -> None:
        """Appends one record."""
        os.write(self._fd, _encoder.encode(record) + b"\n")


class Reader:
    """Reads what a rank appended since the last call, from a file that need not exist yet."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._offset = 0

    def poll(self) -> list[Record]:
        """New complete records, the oldest first."""
        try:
            fd = os.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            return []
        with os.fdopen(fd, "rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [_decoder.decode(line) for line in whole.splitlines()]
