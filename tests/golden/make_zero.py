"""Makes the golden checkpoints of DeepSpeed's anew, with DeepSpeed: for a release that writes them otherwise.

    PYTHONPATH=.:client python -m tests.golden.make_zero tests/golden/zero

One of each stage, of two or three ranks, as `tests/frameworks/zero_ranks.py` trains; and what the living engine said of
its weights and moments, in expected.safetensors.
"""

import shutil
import sys
from pathlib import Path

from tests.frameworks.zero_runs import train

RANKS = {1: 3, 2: 2, 3: 3}  # by stage


def main(out):
    for stage, ranks in RANKS.items():
        made = out / f"stage{stage}"
        shutil.rmtree(made, ignore_errors=True)
        train(made, ranks, stage, "bf16")
        for name in ("16bit.pt", "zero_to_fp32.py", "zero_to_torch.py"):
            (made / name).unlink()
        (made / "expected.safetensors").chmod(0o644)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
