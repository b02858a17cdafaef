"""The files of tests that take longest, for a run to begin with them: python -m tests.longest build/durations.tsv"""

import collections
import os
import sys

LONGEST = os.path.join(os.path.dirname(__file__), "longest.tsv")
_LONG_S = 4.0


def seconds_of_files() -> dict[str, float]:
    """The seconds of the files that take longest, for a run to begin with them."""
    with open(LONGEST, encoding="utf-8") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    return {path: float(seconds) for seconds, path in rows}


def write_longest(durations: str) -> None:
    """From the file of a run."""
    files: collections.Counter[str] = collections.Counter()
    with open(durations, encoding="utf-8") as file:
        for line in list(file)[1:]:
            _used, seconds, _starts, name = line.rstrip("\n").split("\t")
            files[name.partition("::")[0]] += float(seconds)
    with open(LONGEST, "w", encoding="utf-8") as file:
        file.writelines(f"{seconds:.0f}\t{path}\n" for path, seconds in files.most_common() if seconds >= _LONG_S)


if __name__ == "__main__":
    write_longest(sys.argv[1])
