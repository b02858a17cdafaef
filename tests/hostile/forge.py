"""Turns a sound checkpoint into a malformed one whose digests are right all the same: what an attacker would write.

XXH3 is no signature: whoever can write the directory can make every digest match. So no reader may rely on them for
more than accidents.
"""

import contextlib
import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ckptd.shared.base.ids import file_name
from ckptd.shared.format.columns import column, numbers_in, parts_in, signed, squeezed
from ckptd.shared.format.committed_record import encode_committed, make_committed
from ckptd.shared.format.digest import blocks, digest
from ckptd.shared.format.integrity import XXH3, Purpose
from ckptd.shared.format.manifest import COMMITTED, FileRecord, IndexFile, Manifest, decode_manifest, decode_vote
from ckptd.shared.format.packed_layout import Known, Parts, layout_in
from ckptd.shared.format.set_places import vote_place, voter
from tests.runs import SET, manifest_in

_MAGIC = b"CKPTDMF1"
RANK0 = "r00000-p00.safetensors"


def deflated_zeros(nbytes: int) -> bytes:
    """That many zeros, whole MiB: a piece that stands for itself is deflated once, and repeated."""
    squeeze = zlib.compressobj(9, zlib.DEFLATED, -15)
    piece = squeeze.compress(bytes(1 << 20)) + squeeze.flush(zlib.Z_FULL_FLUSH)
    return piece * (nbytes >> 20) + squeeze.flush()


def zeros_in_zlib(nbytes: int) -> bytes:
    """The same as zlib.compress has it, with its head and its sum."""
    total = (nbytes % 65521) << 16 | 1  # Adler-32
    return b"\x78\xda" + deflated_zeros(nbytes) + total.to_bytes(4, "big")


def sealed(body: bytes) -> bytes:
    """A vote's or manifest's file around any body."""
    return _MAGIC + body + digest(_MAGIC + body)


def manifest_of(final: Path) -> Manifest:
    return decode_manifest(manifest_in(final).read_bytes(), where="forge")


def plain(record: Any) -> Any:
    """A record as dicts and lists, which can hold what the record's own types refuse."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(record))


def put_manifest(final: Path, body: bytes, committed: Manifest | None = None) -> None:
    """Any body as the manifest, and a COMMITTED that vouches for it."""
    record = make_committed(committed or manifest_of(final), sealed(body))
    manifest_in(final).unlink()
    (final / record.manifest).write_bytes(sealed(body))
    (final / COMMITTED).write_bytes(encode_committed(record))


def put_index(final: Path, data: bytes) -> None:
    """Any bytes as the index of the records, and a manifest that pins them."""
    before = manifest_of(final)
    assert before.index is not None
    (final / before.index.name).unlink()
    index = IndexFile(len(data), XXH3.digest(data, Purpose.INDEX))
    (final / index.name).write_bytes(data)
    put_manifest(final, msgspec.msgpack.encode(msgspec.structs.replace(before, index=index)))


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


def put_vote(path: Path, raw: bytes) -> Path:
    """Any bytes as a vote, under the name that they have in this vote's place."""
    named = path.with_name(os.path.basename(vote_place(SET, voter(path.name), digest(raw))))
    os.unlink(path)
    named.write_bytes(raw)
    return named


def edit_vote(
    final: Path, number: int, change: Callable[[Any], None], encode: Callable[[Any], bytes] = msgspec.msgpack.encode
) -> None:
    """A vote, all digests and sums above it made right."""
    manifest = manifest_of(final)
    ref = manifest.votes[number]
    path = final / manifest.place_of(ref)
    vote = plain(decode_vote(path.read_bytes(), where="forge"))
    before = _sums(vote["files"])
    change(vote)
    raw = sealed(encode(shared(vote)))
    put_vote(path, raw)
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


def shared(vote: Any) -> Any:
    """With what its records have in common once, as in its file."""
    known: dict[bytes, int] = {}
    for record in vote["files"] if isinstance(vote["files"], list) else ():
        for name in ("plan", "form", "leaves") if isinstance(record, dict) else ():
            if isinstance(record.get(name), bytes):
                record[name] = known.setdefault(record[name], len(known))
    return vote | {"shared": list(known)}


def vote_of(final: Path, rank: int) -> int:
    """The number of the vote that has the rank's record."""
    return next(number for number, ref in enumerate(manifest_of(final).votes) if rank in ref.ranks)


def edit_record(final: Path, rank: int, change: Callable[[Any], None]) -> None:
    """A file's record in its vote, all digests made right."""

    def edit(vote: Any) -> None:
        change(next(record for record in vote["files"] if record["rank"] == rank))

    edit_vote(final, vote_of(final, rank), edit)


def put_part(final: Path, part: str, body: bytes, rank: int = 0) -> None:
    """Any bytes as a part of a layout: its plan, form or own."""
    edit_record(final, rank, lambda record: record.update({part: body}))


def put_layout(final: Path, parts: Parts, rank: int = 0) -> None:
    edit_record(final, rank, lambda record: record.update(parts._asdict()))


def edit_layout(final: Path, change: Callable[[Any], None], rank: int = 0) -> None:
    """A layout in terms of its tensors: each box's name, dtype, shape, offsets, sizes, place, bytes, archive."""
    raw = plain_layout(final, rank)
    change(raw)
    put_layout(final, packed(raw), rank)


def plain_layout(final: Path, rank: int = 0) -> Any:
    return plain(layout_in(records_of(final)[rank].layout, where="forge", known=Known()))


def opened(parts: Parts) -> dict[str, Any]:
    """The parts of a layout as dicts and lists, numbers of its columns too."""
    (plan,) = parts_in(parts.plan, 1, "forge")
    form, *columns = parts_in(parts.form, 8, "forge")
    raw = {name: msgspec.msgpack.decode(data) for name, data in (("plan", plan), ("form", form), ("own", parts.own))}
    offsets = parts_in(raw["own"].pop("offsets"), 1, "forge") if "offsets" in raw["own"] else [column([])]
    return raw | {"columns": [_numbers(one) for one in (*columns, *offsets)]}


def closed(raw: Any, encode: Callable[[Any], bytes] = msgspec.msgpack.encode) -> Parts:
    """Parts of any such dicts and lists. encode: for what they have in them."""
    *columns, offsets = [one if isinstance(one, bytes) else _column(one, encode) for one in raw["columns"]]
    own = raw["own"] | {"offsets": squeezed([offsets])} if isinstance(raw["own"], dict) else raw["own"]
    return Parts(squeezed([encode(raw["plan"])]), squeezed([encode(raw["form"]), *columns]), encode(own))


def _numbers(data: bytes) -> list[int]:
    return list(numbers_in(data, (len(data) - 1) // data[0], "forge"))


def _column(numbers: Any, encode: Callable[[Any], bytes]) -> bytes:
    """Of what are no numbers their encoding, which is no column."""
    try:
        return b"\x08" + b"".join(struct.pack("<Q", number % (1 << 64)) for number in numbers)
    except (TypeError, struct.error):
        return encode(numbers)


def packed(raw: Any) -> Parts:
    """The parts of a layout in its plain form, each box with its offsets and sizes."""
    said = [[*entry, 0, 0][:9] for entry in raw["tensors"]]
    tensors = [[name, dtype, shape] for name, dtype, shape, *_ in said]
    planned = [one for index, one in enumerate(tensors) if one not in tensors[:index]]
    steps, gaps, heads, tails, sizes, offsets = [], [], [], [], [], []
    last, end = -1, raw["header_nbytes"]
    for one, (_, _, _, at, extent, start, nbytes, archive, archive_nbytes) in zip(tensors, said, strict=True):
        steps.append(planned.index(one) - last)
        last = planned.index(one)
        gaps.append(start - end)
        end = start + nbytes
        head = start - archive
        heads.append(head + 1 if archive_nbytes else 0)
        tails.append(archive_nbytes - head - nbytes if archive_nbytes else 0)
        sizes += extent
        offsets += at
    version = raw["version"]
    own = {name: raw[name] for name in _OWN if name in raw} | {"plan_id": ""}
    columns = [signed(steps), [0] * len(steps), sizes, signed(gaps), heads, tails, [0] * len(planned), offsets]
    plan = {"version": version, "tensors": planned, "paths": raw["paths"]}
    form = {"version": version, "count": len(steps)}
    return closed({"plan": plan, "form": form, "own": own, "columns": columns})


_OWN = (
    "version", "rank", "world_size", "header_nbytes", "image_nbytes", "aliases", "parts", "names", "saved_for",
    "held_alike",
)  # fmt: skip


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
