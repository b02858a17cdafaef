"""Malformed checkpoints whose one image is two files, since a tensor has two boxes: what cases.py is for one file."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ckptd.shared.base.ids import MAX_PARTS, file_name
from tests.hostile import forge
from tests.hostile.cases import BOTH, LOAD, VERIFY, Case
from tests.hostile.forge import RANK0
from tests.runs import VOTES

PART = file_name(0, 1)
PAGE = 4096
PART_CASES: dict[str, Case] = {}


def add(name: str, by: frozenset[str], file: str, make: Callable[[Path], object]) -> None:
    assert name not in PART_CASES, name
    PART_CASES[name] = Case(lambda final: make(final) and None, by, file)


def sizes(final: Path) -> list[int]:
    return list(forge.records_of(final)[0].parts)


def put(final: Path, parts: list[int]) -> None:
    """The record with these parts, and a COMMITTED that counts them."""
    forge.edit_record(final, 0, lambda raw: raw.update(parts=parts))
    forge.edit_committed(final, lambda raw: raw.update(files=max(1, len(parts))))


# --- the record says other files than there are


def record(
    name: str, change: Callable[[list[int]], list[int]], by: frozenset[str] = BOTH, file: str = VOTES[0]
) -> None:
    def make(final: Path) -> None:
        parts = change(sizes(final))
        put(final, parts)

    add(f"record's parts {name}", by, file, make)


record("do not add up", lambda p: [p[0], p[1] + PAGE])
record("are one", lambda p: p[:1])
record("overflow", lambda p: [1 << 61, p[1]])
record("negative", lambda p: [-PAGE, p[0] + p[1] + PAGE])
record("are no whole pages", lambda p: [p[0] - 1, p[1] + 1])
record("are many", lambda p: [0] * MAX_PARTS + p)
record("are none", lambda p: [], file=RANK0)
record("end elsewhere", lambda p: [p[0] - PAGE, p[1] + PAGE], file=RANK0)
record("swapped", lambda p: [p[1], p[0]], file="r00000")
record("one more, empty", lambda p: [p[0], 0, p[1]], file="r00000")
add("record with the name of a part", BOTH, "r00000",
    lambda final: forge.edit_record(final, 0, lambda raw: raw.update(name=PART)))  # fmt: skip
add("record with the name of a part of another rank", BOTH, VOTES[0],
    lambda final: forge.edit_record(final, 0, lambda raw: raw.update(name=file_name(1, 1))))  # fmt: skip


# --- the layout says other files than the record, or both say the same that cannot be


def layout(name: str, change: Callable[[Any], object], *, too: bool = False) -> None:
    """too: the record says the same."""

    def make(final: Path) -> None:
        forge.edit_layout(final, lambda raw: change(raw) and None)
        if too:
            changed = msgspec.msgpack.decode(forge.records_of(final)[0].own)
            parts = [part[0] for part in changed.get("parts", [])]
            put(final, parts)

    add(f"layout's parts {name}", BOTH, "r00000", make)


def moved(by: int) -> Callable[[Any], object]:
    def change(raw: Any) -> None:
        raw["parts"][0][0] += by
        raw["parts"][1][0] -= by

    return change


def a_third(raw: Any) -> None:
    """An empty file between the two, or one of less than a header."""
    raw["parts"].insert(1, [0, 0])


layout("do not add up", lambda raw: raw["parts"][1].__setitem__(0, 1))
layout("huge", lambda raw: raw["parts"][0].__setitem__(0, 1 << 61))
layout("negative", lambda raw: raw["parts"][0].__setitem__(0, -1))
layout("are none", lambda raw: raw.pop("parts"))
layout("are one", lambda raw: raw["parts"].pop())
layout("are many", lambda raw: raw.update(parts=[[0, 0]] * MAX_PARTS + raw["parts"]))
layout("are no parts", lambda raw: raw.update(parts=[1, 2]))
layout("end elsewhere", moved(-PAGE))
layout("are no whole pages, and the record agrees", moved(1), too=True)
layout("end within a tensor, and the record agrees", moved(PAGE), too=True)
layout("are three, and the record agrees", a_third, too=True)
layout("are none, and the record agrees", lambda raw: raw.pop("parts"), too=True)
layout("have a header over their tensors", lambda raw: raw["parts"][1].__setitem__(1, raw["parts"][1][0]))
layout("have no header", lambda raw: raw["parts"][1].__setitem__(1, 0))
layout("have another first header", lambda raw: raw["parts"][0].__setitem__(1, PAGE * 3))
layout("have a box twice in one", lambda raw: raw["tensors"].append(raw["tensors"][-1]))


def outside(raw: Any) -> None:
    """The second box's bytes, in the first file."""
    entry = max(raw["tensors"], key=lambda tensor: tensor[5])
    entry[5] -= raw["parts"][0][0]


layout("have a box in the other's header", outside)


def overlapping(raw: Any) -> None:
    """Both boxes claim the same rows, so that others are nobody's."""
    first, second = [tensor for tensor in raw["tensors"] if tensor[0] == "boxes"]
    second[3] = first[3]


add("layout with a box twice and one never", frozenset({LOAD}), "step-000000010",
    lambda final: forge.edit_layout(final, overlapping))  # fmt: skip


# --- the files


def swapped(final: Path) -> None:
    first, second = final / RANK0, final / PART
    first.rename(final / "x")
    second.rename(first)
    (final / "x").rename(second)


def flipped(final: Path) -> None:
    data = bytearray((final / PART).read_bytes())
    data[-200] ^= 1
    (final / PART).write_bytes(data)


def of_another_rank(final: Path) -> None:
    (final / PART).rename(final / file_name(1, 1))


def cut(final: Path) -> None:
    os.truncate(final / PART, PAGE)


add("unsigned part missing", BOTH, PART, lambda final: os.unlink(final / PART))
add("unsigned first part missing", BOTH, RANK0, lambda final: os.unlink(final / RANK0))
add("unsigned parts swapped", BOTH, "r00000", swapped)
add("unsigned part as another rank's", BOTH, PART, of_another_rank)
add("unsigned part flipped", BOTH, "r00000", flipped)  # the block lies in both files
add("unsigned part cut off", BOTH, PART, cut)
add("unsigned part of a terabyte", BOTH, PART, lambda final: os.truncate(final / PART, 1 << 40))
for _what in ("fifo", "directory", "device", "nowhere", "loop", "outside"):
    add(f"{_what} as part", BOTH, PART, lambda final, w=_what: forge.instead(final / PART, w))


def signed(change: Callable[[list[bytes]], list[bytes]]) -> Callable[[Path], None]:
    """Other bytes in the files, of the same sizes, with the digests that belong to them."""

    def make(final: Path) -> None:
        before = [(final / file_name(0, number)).read_bytes() for number in range(2)]
        after = change(before)
        assert list(map(len, after)) == list(map(len, before))
        forge.put_parts(final, after)

    return make


def headed(data: bytes, text: bytes) -> bytes:
    nbytes = int.from_bytes(data[:8], "little")
    return data[:8] + text.ljust(nbytes) + data[8 + nbytes :]


def other_offsets(data: bytes) -> bytes:
    nbytes = int.from_bytes(data[:8], "little")
    header = msgspec.json.decode(data[8 : 8 + nbytes])
    header["__metadata__"]["DCP_SHARDING_INFO"] = '{"boxes":{"saved_offsets":[0,0]}}'
    return headed(data, msgspec.json.encode(header))


add("part with no JSON", frozenset({VERIFY}), PART, signed(lambda p: [p[0], headed(p[1], b"{")]))
add("part of nothing", frozenset({VERIFY}), PART, signed(lambda p: [p[0], bytes(len(p[1]))]))
add("part that says other rows", frozenset({VERIFY}), PART, signed(lambda p: [p[0], other_offsets(p[1])]))
add("part of another save", frozenset({VERIFY}), PART,
    signed(lambda p: [p[0], p[1].replace(b"00000001-0000000001-", b"00000001-0000000009-")]))  # fmt: skip
