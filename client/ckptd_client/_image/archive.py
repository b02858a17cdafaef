"""Wraps a payload into a torch.save archive: a zip head before it and a zip tail after it.

An archive of one tensor holds three stored records: ``data.pkl`` (a pickle that rebuilds a contiguous CPU tensor over
storage 0), ``version``, and ``data/0``, which is the payload itself. See docs/format.md.
"""

from typing import NamedTuple

from ckptd.shared.torchfile.pickling import TensorRef, dumps
from ckptd.shared.torchfile.zip_write import Record, directory, local_header, padded_header, record_of

_ROOT = b"a/"  # all records are in one directory; torch takes its name from the first


class Wrap(NamedTuple):
    """Head and tail around a payload. Head, payload and tail together are the archive."""

    head: bytes
    tail: bytes


def wrap(dtype: str, sizes: tuple[int, ...], nbytes: int, *, start: int, align: int) -> Wrap:
    """Head and tail of an archive that begins at file offset start, its payload at a multiple of align (64 or more)."""
    records = []
    head = bytearray()
    for name, data in ((b"data.pkl", dumps(TensorRef(0, dtype, sizes, nbytes))), (b"version", b"3\n")):
        records.append(record_of(_ROOT + name, data, len(head)))
        head += local_header(records[-1]) + data
    payload = Record(_ROOT + b"data/0", nbytes, 0, len(head))  # our readers use digests, not its CRC
    head += padded_header(payload, start=start + len(head), align=align)
    records.append(payload)
    return Wrap(bytes(head), directory(records, len(head) + nbytes))
