"""The client's, stock readers' and golden tests against several releases of torch, each in an environment of its own.

    python scripts/torch_matrix.py [RELEASE ...]      make test-matrix [MATRIX="2.12.1 2.13.0"]

The CPU wheel (2.13.0+cpu) where pip's indexes or torch's own have it, else the default wheel with the CUDA libraries
that it cannot be imported without; tests see no GPU either way. A release that cannot be had is said so and counts as
not run. Exit code 1 when a test failed or nothing could be run; 3 when fewer than two releases could be.
"""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MATRIX = ROOT / ".matrix"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# The one that constraints.txt pins, and a newer one.
RELEASES = ["2.13.0", "2.14.1"]
# Downloads, and what they unpack to.
DEFAULT_WHEEL_ROOM = 16 << 30
TESTS = ["tests/unit/client", "tests/interop", "tests/golden"]
WANTED = 2
FAILED, TOO_FEW = 1, 3


def constraints(release: str) -> Path:
    """constraints.txt, less torch and what torch itself decides on."""
    chosen = ("torch==", "sympy==", "networkx==", "filelock==", "fsspec==", "mpmath==", "Jinja2==")
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    path = MATRIX / f"constraints-{release}.txt"
    path.write_text("\n".join([f"torch=={release}", *(line for line in lines if not line.startswith(chosen))]) + "\n")
    return path


def pip(folder: Path, *arguments: str) -> str:
    """`pip install` into an environment: empty when it worked, else pip's last words."""
    command = [str(folder / "bin/python"), "-m", "pip", "install", "-q", "--no-cache-dir", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def install(release: str) -> str:
    """Empty when the environment of the release is there, else pip's last words."""
    folder = MATRIX / release
    if (folder / ".installed").exists():
        return ""
    venv.create(folder, with_pip=True, clear=True)
    # The CPU wheel needs no CUDA library, but few indexes have one. The default wheel cannot be imported without them.
    if pip(folder, "--retries", "0", "--extra-index-url", CPU_INDEX, f"torch=={release}+cpu"):
        room = shutil.disk_usage(MATRIX).free
        if room < DEFAULT_WHEEL_ROOM:
            return f"no CPU wheel, and the default one wants {DEFAULT_WHEEL_ROOM >> 30} GiB; {room >> 30} are free"
        print("no CPU wheel offered: the default one, with its CUDA libraries", flush=True)
        if problem := pip(folder, f"torch=={release}"):
            return problem
    if problem := pip(folder, "-c", str(constraints(release)), "-e", f"{ROOT}[test]"):
        return problem
    (folder / ".installed").touch()
    return ""


def run(release: str) -> bool:
    """Whether all tests passed or were skipped."""
    command = [str(MATRIX / release / "bin/python"), "-m", "pytest", "-q", "-rs", "-n", "2", *TESTS]
    # A default wheel on a machine with GPUs is tested on the CPU as well.
    environ = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'client'}", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode == 0


def main(releases: list[str]) -> int:
    """Exit code."""
    MATRIX.mkdir(exist_ok=True)
    results = {}
    for release in releases or RELEASES:
        print(f"--- torch {release}", flush=True)
        problem = install(release)
        results[release] = f"not offered: {problem}" if problem else "passed" if run(release) else "failed"
    print("--- matrix")
    for release, result in results.items():
        print(f"torch {release}: {result}")
    done = [result for result in results.values() if not result.startswith("not offered")]
    if "failed" in done or not done:
        return FAILED
    return 0 if len(done) >= min(WANTED, len(results)) else TOO_FEW


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
