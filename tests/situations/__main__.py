"""``python -m tests.situations [NAME ...]`` takes captures again and writes them into docs/status-captures.md."""

import pathlib
import sys
import tempfile

from tests.situations import driven, page, real


def main(wanted: list[str]) -> None:
    """All of them, or those that are named."""
    for name in wanted or page.names():
        if name in driven.SITUATIONS:
            text = page.rendered(driven.SITUATIONS[name]())
        else:
            with tempfile.TemporaryDirectory(prefix="ckptd-capture-") as base:
                text = real.SITUATIONS[name](pathlib.Path(base))
        page.put(name, f"$ ckptd status\n{text}")
        sys.stdout.write(f"--- {name}\n{text}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
