"""The page of ``ckptd report`` in a browser. ``python -m tests.unit.cli.report_picture`` draws the picture of docs."""

import functools
import os
import pathlib
import shutil
import subprocess
import tempfile

from ckptd import cli
from tests.unit.history import stored
from tests.unit.history.played import Training, played, scrubbed
from tests.unit.sources import ROOT

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
SHOWN = ROOT / "docs" / "assets" / "report.png"


@functools.cache
def browser():
    """None where there is none."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def picture(page, out, *, dark, size):
    """Writes a PNG of so many pixels."""
    subprocess.run(
        [
            browser(), "--no-sandbox", "--headless", "--disable-gpu", "--hide-scrollbars", f"--screenshot={out}",
            f"--user-data-dir={out}.profile", f"--window-size={size[0]},{size[1]}", "--force-device-scale-factor=1",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}", f"file://{page}",
        ],
        check=True, capture_output=True, timeout=120, env=os.environ | {"HOME": os.path.dirname(out)},
    )  # fmt: skip


def main():
    with tempfile.TemporaryDirectory() as folder:
        journal = scrubbed(played(Training(jitter=0.5), failures=5).journal)
        job = stored.write(os.path.join(folder, "ckpt", "llama-7b"), journal)
        page = os.path.join(folder, "report.html")
        assert cli.invoke(["report", job, "-o", page]) == 0
        shown = pathlib.Path(page).read_text(encoding="utf-8").replace(folder, "/scratch/me")
        pathlib.Path(page).write_text(shown, encoding="utf-8")
        picture(page, os.path.join(folder, "report.png"), dark=False, size=(1040, 1660))
        shutil.copyfile(os.path.join(folder, "report.png"), SHOWN)


if __name__ == "__main__":
    main()
