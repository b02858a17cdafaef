"""docs/status.md has every field that ``ckptd status --json`` prints, and no other."""

import pathlib
import re

import msgspec

from ckptd.shared.protocol import status
from tests.cluster import ROOT
from tests.unit import a_status

STRUCTS = {
    name: {field.name for field in msgspec.structs.fields(found)}
    for name, found in vars(status).items()
    if isinstance(found, type) and issubclass(found, msgspec.Struct)
}


def documented():
    found, of = {}, ""
    text = pathlib.Path(ROOT, "docs", "status.md").read_text(encoding="utf-8")
    table = text[text.index("| of | field | |") : text.index("## The log")]
    for first, names in re.findall(r"^\| (\w*) ?\| (.*?) \|", table, re.MULTILINE):
        of = first or of
        found.setdefault(of, set()).update(re.findall(r"`(\w+)`", names))
    del found["of"]
    return found


def test_every_field_is_documented_and_nothing_else():
    assert documented() == {name: fields for name, fields in STRUCTS.items() if name != "SaveId"}


def test_what_was_there_in_schema_1_is_there_still():
    """Scripts rely on it. A field that is to go takes another schema number."""
    assert status.SCHEMA == 1
    first = {
        "Status": "schema version node pid arena uptime_s budget_nbytes used_nbytes tightest_limit jobs workers "
        "refused_messages errors",
        "JobStatus": "job store incarnation world_size ranks checkpoints drain errors scheme set_size coordinator "
        "nodes degraded",
        "NodeStatus": "node domain ranks reachable set_index encoded_step problem",
        "RankStatus": "rank host pid alive slots slots_in_use slot_nbytes newest_step",
    }
    assert all(set(fields.split()) <= STRUCTS[name] for name, fields in first.items())


def test_a_status_of_an_older_daemon_reads():
    """Fields that were added have defaults."""
    raw = msgspec.to_builtins(a_status.status())
    for job in raw["jobs"]:
        del job["silent"]
        for rank in job["ranks"]:
            del rank["drain_nbytes"], rank["drain_nbytes_done"]
    assert msgspec.convert(raw, status.Status) == a_status.status()
