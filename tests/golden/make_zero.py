"""Makes the golden checkpoints of DeepSpeed's anew, with DeepSpeed: for a release that writes them otherwise.

    PYTHONPATH=.:client python -m tests.golden.make_zero tests/golden/zero

One of each stage, of two or three ranks, and one of a pipeline, of four, as the scripts in tests/frameworks train; and
what the living engine said of its weights and moments, in expected.safetensors.
"""

import shutil
import sys
from pathlib import Path

from tests.frameworks.zero_runs import EXPECTED, train, train_pipeline

RANKS = {1: 3, 2: 2, 3: 3}  # by stage


def main(out):
    shutil.rmtree(out, ignore_errors=True)
    for stage, ranks in RANKS.items():
        train(out / f"stage{stage}", ranks, stage, "bf16")
    train_pipeline(out / "pipeline")
    for made in out.iterdir():
        for name in ("16bit.pt", "zero_to_fp32.py", "zero_to_torch.py"):
            (made / name).unlink(missing_ok=True)
        (made / EXPECTED).chmod(0o644)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
