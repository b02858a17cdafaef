"""Tries a store in a child process, so that a hung mount costs the deadline and nothing else.

``python -m ckptd.doctor.probe_store URL`` prints a JSON object per step; what it printed before the deadline is known.
"""

import contextlib
import json
import sys
from typing import Any

import msgspec

from ckptd.doctor.rules import StoreFacts
from ckptd.shared.files.child_process import told_within
from ckptd.shared.format.integrity import XXH3
from ckptd.shared.stores.kinds import absolute
from ckptd.store.opening import open_store


def probe_store(path: str, *, deadline_s: float = 20.0) -> StoreFacts:
    """What can be found out about the store at path within deadline_s. Never touches path in this process."""
    path = absolute(path)
    return parse_report(path, told_within(deadline_s, "ckptd.doctor.probe_store", path)[0])


def parse_report(path: str, output: bytes) -> StoreFacts:
    """Facts from the child's lines; a line cut short by the kill is dropped."""
    facts: dict[str, Any] = {"path": path}
    for line in output.splitlines():
        with contextlib.suppress(ValueError):
            facts.update(json.loads(line))
    return msgspec.convert(facts, StoreFacts)


if __name__ == "__main__":
    for facts in open_store(sys.argv[1], XXH3).probe():
        sys.stdout.write(json.dumps(facts) + "\n")
        sys.stdout.flush()
