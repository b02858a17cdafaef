"""docs/protocol.md lists each message between processes, and of each the fields that it has."""

import re
from typing import Any, NamedTuple, get_args

from msgspec.structs import fields

from ckptd.peers import packets
from ckptd.shared.protocol import messages
from ckptd.store import messages as worker
from tests.unit.sources import ROOT


class Section(NamedTuple):
    """A part of the page, and what it lists. common: fields that each message has, which the page names once."""

    heading: str
    unions: tuple[Any, ...]
    common: frozenset[str]


SECTIONS = (
    Section(
        "Rank and daemon",
        (messages.Request, messages.Reply),
        frozenset({"seq", "reply_to", "version", "release"}),
    ),
    Section("Daemon and store worker", (worker.Request,), frozenset({"id"})),
    Section("Between daemons", (packets.Body,), frozenset()),
)
ENTRY_RE = re.compile(r"^- (?:push )?\*\*(`.+?`)\*\*\.(.*?)(?=^- |^$)", flags=re.MULTILINE | re.DOTALL)
FIELDS_RE = re.compile(r"^Fields(?: beyond )?: (.*?)(?:\.$|\. )")


def entries(text: str) -> dict[str, str]:
    """Name of each message, and what the page says of it."""
    found = [(names, " ".join(told.split())) for names, told in ENTRY_RE.findall(text)]
    return {name: told for names, told in found for name in re.findall(r"`(.+?)`", names)}


def fields_in(told: str) -> set[str]:
    """The names in the list of fields; what stands in brackets or backticks explains them."""
    bare = re.sub(r"`[^`]*`", "", told)
    while (less := re.sub(r"\([^()]*\)", "", bare)) != bare:
        bare = less
    said = FIELDS_RE.match(bare)
    return {name.strip() for name in said[1].split(",")} if said else set()


def wrong(text: str, section: Section) -> list[str]:
    """What the page's section does not say of its messages as they are."""
    told = entries(text)
    kinds = {kind.__struct_config__.tag: kind for union in section.unions for kind in get_args(union)}
    problems = [f"{name}: not in the page" for name in kinds.keys() - told.keys()]
    problems += [f"{name}: there is no such message" for name in told.keys() - kinds.keys()]
    for name in kinds.keys() & told.keys():
        there, listed = {field.encode_name for field in fields(kinds[name])}, fields_in(told[name])
        if there - section.common != listed - section.common:
            problems.append(f"{name}: has {sorted(there - section.common)}, the page {sorted(listed - section.common)}")
    return sorted(problems)


def test_the_page_of_the_protocol_lists_the_fields_of_each_message() -> None:
    page = (ROOT / "docs" / "protocol.md").read_text()
    parts = dict(part.split("\n", 1) for part in re.split(r"^## ", page, flags=re.MULTILINE)[1:])
    assert {section.heading: wrong(parts[section.heading], section) for section in SECTIONS} == {
        section.heading: [] for section in SECTIONS
    }


def test_a_field_that_is_missing_or_too_many_is_found() -> None:
    text = "- **`probe`**. Fields beyond `id`: job `[store, job]`, wait (nil: a (b)). Result: none.\n\n"
    (found,) = [one for one in wrong(text, SECTIONS[1]) if one.startswith("probe")]
    assert found == "probe: has [], the page ['job', 'wait']"
    assert "commit: not in the page" in wrong(text, SECTIONS[1])
    assert fields_in("Answer: `NodeInfo`.") == set()
