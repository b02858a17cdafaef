"""The client's, stock readers' and golden tests against several releases of torch, each in an environment of its own.

    python scripts/torch_matrix.py [RELEASE ...]      make test-matrix [MATRIX="2.8.0 2.13.0"]

Only CPU wheels (2.13.0+cpu), from the indexes that pip is set to, and from torch's own where it can be reached. A
release that none of them offers is said so and counts as not run. Exit code 1 when a test failed or nothing could be
run; 3 when fewer than two releases could be.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MATRIX = ROOT / ".matrix"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# The first release with torch.distributed.fsdp.fully_shard, one between, and the one that constraints.txt pins.
RELEASES = ["2.6.0", "2.9.1", "2.13.0"]
TESTS = ["tests/unit/client", "tests/interop", "tests/golden"]
WANTED = 2
FAILED, TOO_FEW = 1, 3


def constraints(release: str) -> Path:
    """constraints.txt, less torch and what torch itself decides on."""
    chosen = ("torch==", "sympy==", "networkx==", "filelock==", "fsspec==", "mpmath==", "Jinja2==")
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    path = MATRIX / f"constraints-{release}.txt"
    path.write_text(
        "\n".join([f"torch=={release}+cpu", *(line for line in lines if not line.startswith(chosen))]) + "\n"
    )
    return path


def install(release: str) -> str:
    """Empty when the environment of the release is there, else pip's last words."""
    folder = MATRIX / release
    if (folder / ".installed").exists():
        return ""
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "-q"]
    # First torch alone: what its index lacks is found out before anything is fetched.
    for packages in (
        ["--extra-index-url", CPU_INDEX, f"torch=={release}+cpu"],
        ["-c", str(constraints(release)), "-e", f"{ROOT}[test]"],
    ):
        done = subprocess.run([*pip, *packages], capture_output=True, text=True, check=False)
        if done.returncode:
            return done.stderr.strip().splitlines()[-1]
    (folder / ".installed").touch()
    return ""


def run(release: str) -> bool:
    """Whether all tests passed or were skipped."""
    command = [str(MATRIX / release / "bin/python"), "-m", "pytest", "-q", "-rs", "-n", "2", *TESTS]
    environ = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'client'}"}
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
