"""Turns a sound checkpoint into a malformed one whose digests are right all the same: what an attacker would write.

XXH3 is no signature: whoever can write the directory can make every digest match. So no reader may rely on them for
more than accidents.
"""

import contextlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ckptd.shared.base.ids import file_name
from ckptd.shared.format import layout as lay
from ckptd.shared.format.digest import blocks, digest
from ckptd.shared.format.manifest import (
    COMMITTED,
    MANIFEST,
    FileRecord,
    Manifest,
    decode_manifest,
    decode_vote,
    encode_committed,
    make_committed,
)

_MAGIC = b"CKPTDMF1"
RANK0 = "r00000-p00.safetensors"


def sealed(body: bytes) -> bytes:
    """A vote's or manifest's file around any body."""
    return _MAGIC + body + digest(_MAGIC + body)


def manifest_of(final: Path) -> Manifest:
    return decode_manifest((final / MANIFEST).read_bytes(), where="forge")


def plain(record: Any) -> Any:
    """A record as dicts and lists, which can hold what the record's own types refuse."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(record))


def put_manifest(final: Path, body: bytes, committed: Manifest | None = None) -> None:
    """Any body as the manifest, and a COMMITTED that vouches for it."""
    record = make_committed(committed or manifest_of(final), sealed(body))
    (final / MANIFEST).write_bytes(sealed(body))
    (final / COMMITTED).write_bytes(encode_committed(record))


def edit_manifest(final: Path, change: Callable[[Any], None]) -> None:
    """The manifest with a change made to its plain form."""
    before = manifest_of(final)
    raw = plain(before)
    change(raw)
    put_manifest(final, msgspec.msgpack.encode(raw), before)


def edit_committed(final: Path, change: Callable[[Any], None]) -> None:
    raw = json.loads((final / COMMITTED).read_bytes())
    change(raw)
    (final / COMMITTED).write_text(json.dumps(raw))


def records_of(final: Path) -> list[FileRecord]:
    """Of all images, by rank."""
    manifest = manifest_of(final)
    votes = [decode_vote((final / manifest.place_of(ref)).read_bytes(), where="forge") for ref in manifest.votes]
    return sorted((record for vote in votes for record in vote.files), key=lambda record: record.rank)


def edit_vote(final: Path, number: int, change: Callable[[Any], None]) -> None:
    """A vote, all digests and sums above it made right."""
    manifest = manifest_of(final)
    ref = manifest.votes[number]
    path = final / manifest.place_of(ref)
    vote = plain(decode_vote(path.read_bytes(), where="forge"))
    before = _sums(vote["files"])
    change(vote)
    raw = sealed(msgspec.msgpack.encode(vote))
    path.write_bytes(raw)
    changed = plain(manifest)
    changed["votes"][number] = plain(msgspec.structs.replace(ref, nbytes=len(raw), digest=digest(raw)))
    with contextlib.suppress(TypeError, KeyError, AttributeError):  # of what is no number
        after = _sums(vote["files"])
        sums = {name: getattr(manifest, name) + after[name] - before[name] for name in before}
        if 0 <= sums["nbytes"] < 1 << 62 and sums["files"] > 0:
            changed |= sums
            manifest = msgspec.structs.replace(manifest, **sums)
    put_manifest(final, msgspec.msgpack.encode(changed), manifest)


def _sums(records: Any) -> dict[str, int]:
    """What a manifest has of them."""
    return {
        "nbytes": sum(record["nbytes"] for record in records),
        "files": sum(max(1, len(record.get("parts", []))) for record in records),
    }


def vote_of(final: Path, rank: int) -> int:
    """The number of the vote that has the rank's record."""
    return next(number for number, ref in enumerate(manifest_of(final).votes) if rank in ref.ranks)


def edit_record(final: Path, rank: int, change: Callable[[Any], None]) -> None:
    """A file's record in its vote, all digests made right."""

    def edit(vote: Any) -> None:
        change(next(record for record in vote["files"] if record["rank"] == rank))

    edit_vote(final, vote_of(final, rank), edit)


def put_layout(final: Path, body: bytes, rank: int = 0) -> None:
    edit_record(final, rank, lambda record: record.update(layout=body))


def edit_layout(final: Path, change: Callable[[Any], None], rank: int = 0) -> None:
    raw = plain(lay.decode_layout(records_of(final)[rank].layout, where="forge"))
    change(raw)
    put_layout(final, msgspec.msgpack.encode(raw), rank)


def put_leaves(final: Path, body: bytes, rank: int = 0) -> None:
    edit_record(final, rank, lambda record: record.update(leaves=body))


def put_image(final: Path, image: bytes, rank: int = 0) -> None:
    """Other bytes as a rank's image, with the digests that belong to them."""
    name = records_of(final)[rank].name
    (final / name).write_bytes(image)
    digests = b"".join(digest(image[start:stop]) for start, stop in blocks(len(image)))
    edit_record(final, rank, lambda record: record.update(digests=digests, nbytes=len(image)))


def put_parts(final: Path, parts: list[bytes]) -> None:
    """Other bytes as the files of rank 0's image, of the sizes that they had, with the digests that belong to them."""
    image = b"".join(parts)
    for number, part in enumerate(parts):
        (final / file_name(0, number)).write_bytes(part)
    digests = b"".join(digest(image[start:stop]) for start, stop in blocks(len(image)))
    edit_record(final, 0, lambda record: record.update(digests=digests))


def header_of(final: Path, rank: int = 0) -> dict[str, Any]:
    raw = (final / records_of(final)[rank].name).read_bytes()
    (nbytes,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + nbytes])


def put_header(final: Path, text: bytes, rank: int = 0, *, length: int | None = None) -> None:
    """Any text in the header's place, padded to it; length: what the first 8 bytes say instead."""
    raw = (final / records_of(final)[rank].name).read_bytes()
    (nbytes,) = struct.unpack("<Q", raw[:8])
    assert len(text) <= nbytes, (len(text), nbytes)
    said = nbytes if length is None else length
    put_image(final, struct.pack("<Q", said) + text.ljust(nbytes) + raw[8 + nbytes :], rank)


def edit_header(final: Path, change: Callable[[Any], None], rank: int = 0) -> None:
    raw = header_of(final, rank)
    change(raw)
    put_header(final, json.dumps(raw, separators=(",", ":")).encode(), rank)


def put_stock(final: Path, name: str, data: bytes) -> None:
    """Other bytes as one of the files for stock readers, pinned by the manifest."""
    (final / name).write_bytes(data)

    def pin(raw: Any) -> None:
        entry = {"name": name, "nbytes": len(data), "digest": digest(data)}
        raw["stock"] = [*(stock for stock in raw["stock"] if stock["name"] != name), entry]

    edit_manifest(final, pin)


def instead(path: Path, what: str) -> None:
    """Something that is no file in a file's place."""
    content = path.read_bytes()
    os.unlink(path)
    if what == "fifo":
        os.mkfifo(path)
    elif what == "directory":
        path.mkdir()
    elif what == "device":
        path.symlink_to("/dev/zero")
    elif what == "nowhere":
        path.symlink_to("/nonexistent/file")
    elif what == "loop":
        path.symlink_to(path.name)
    else:  # the very same bytes, outside
        outside = path.parents[2].parent / f"outside-{path.name.lstrip('.')}-{os.urandom(4).hex()}"
        outside.write_bytes(content)
        path.symlink_to(outside)
