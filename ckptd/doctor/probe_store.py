"""Tries a store in a child process, so that a hung mount costs the deadline and nothing else.

``python -m ckptd.doctor.probe_store URL`` prints a JSON object per step; what it printed before the deadline is known.
"""

import contextlib
import json
import subprocess
import sys
from typing import Any

import msgspec

from ckptd.doctor.rules import StoreFacts
from ckptd.shared.files.child_process import command, environment
from ckptd.shared.format.integrity import XXH3
from ckptd.shared.stores.kinds import absolute
from ckptd.store.opening import open_store

_GRACE_S = 0.5


def probe_store(path: str, *, deadline_s: float = 20.0) -> StoreFacts:
    """What can be found out about the store at path within deadline_s. Never touches path in this process."""
    path = absolute(path)
    child = subprocess.Popen(
        command("ckptd.doctor.probe_store", path),
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        output, _ = child.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        child.kill()
        output = _last_words(child)
    return parse_report(path, output)


def _last_words(child: "subprocess.Popen[bytes]") -> bytes:
    """Output of a killed child. One stuck in the kernel outlives SIGKILL and is left to die later."""
    try:
        output, _ = child.communicate(timeout=_GRACE_S)
    except subprocess.TimeoutExpired as error:
        if child.stdout is not None:
            child.stdout.close()
        return error.output or b""
    return output


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
