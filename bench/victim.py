"""A trainer that saves once and ends by SIGKILL, so that another one can load the state from the arena."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import ckptd_client
from bench import states

_TIMEOUT_S = 180.0


def crash(job: str, store: Path, arena: Path, nbytes: int) -> str:
    """Runs a victim to its end; the fingerprint of the state it saved and made durable."""
    command = [sys.executable, "-m", "bench.victim", job, str(store), str(arena), str(nbytes)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=_TIMEOUT_S)
    if result.returncode != -signal.SIGKILL:
        raise RuntimeError(f"the victim ended with {result.returncode} before it had saved")
    return result.stdout.split()[-1]


def main() -> None:
    """Saves, prints the fingerprint and ends by SIGKILL."""
    job, store, arena, nbytes = sys.argv[1:]
    state = states.realistic(int(nbytes))
    states.mutate(state, os.getpid())
    client = ckptd_client.connect(job=job, store=store, arena=arena)
    client.prepare(state)
    client.save(state, 1).wait("durable", _TIMEOUT_S)
    print(states.fingerprint(state), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
