"""docs/json.md has every field that a verb prints with --json, and no other: what is printed is a struct."""

import importlib
import pathlib
import re
from typing import get_args, get_type_hints

import msgspec
import pytest

from ckptd import cli
from ckptd.checkpoint.export.run import Summary
from ckptd.cli.last_state import Output as LastState
from ckptd.shared.protocol.status import Status
from tests.cluster import ROOT

MODULES = {verb: importlib.import_module(f"ckptd.cli.{name}") for verb, name in cli._VERBS.items()}
SILENT = {"run", "metrics", "demo"}
ELSEWHERE = {"status", "history", "report", "advise"}  # on pages of their own, with tests of their own
OUTPUTS = {"export": Summary, "status": Status}  # printed as they are
OUTPUTS |= {verb: found.Output for verb, found in MODULES.items() if verb not in SILENT | set(OUTPUTS)}


def structs_in(hint):
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint
    for inner in get_args(hint):
        yield from structs_in(inner)


def fields_of(name, struct):
    """Of the struct and of those below it, by name: the names of their fields in JSON."""
    found = {name: {field.encode_name for field in msgspec.structs.fields(struct)}}
    for hint in get_type_hints(struct).values():
        for inner in structs_in(hint):
            found |= fields_of(inner.__name__, inner)
    return found


def documented():
    found, of = {}, ""
    text = pathlib.Path(ROOT, "docs", "json.md").read_text(encoding="utf-8")
    for first, names in re.findall(r"^\| (\w*) ?\| (.*?) \|", text, re.MULTILINE):
        of = first or of
        found.setdefault(of, set()).update(re.findall(r"`(\w+)`", names))
    del found["of"]
    return found


def test_every_field_is_documented_and_nothing_else():
    expected = fields_of("LastState", LastState)  # of a status without a daemon
    for verb, struct in OUTPUTS.items():
        if verb not in ELSEWHERE:
            expected |= fields_of(verb, struct)
    assert documented() == expected


@pytest.mark.parametrize("verb", MODULES)
def test_a_verb_has_json_or_is_known_to_have_none(verb):
    flags = {flag for one in MODULES[verb].command.params for flag in one.opts}
    assert ("--json" in flags) == (verb in OUTPUTS)


@pytest.mark.parametrize("verb", OUTPUTS)
def test_the_schema_is_that_of_the_documents(verb):
    name = f"`schema` is {MODULES[verb].SCHEMA}." if hasattr(MODULES[verb], "SCHEMA") else "`schema` is 1."
    assert name in pathlib.Path(ROOT, "docs", "json.md").read_text(encoding="utf-8")
