"""A journal as it lies on a store."""

import os

from ckptd.shared.protocol.journal import JOURNAL_DIR, RunBegan, framed, segment


def write(job, journal, *, segment_entries=1000):
    """Puts the entries of each run below a job's directory. Returns the directory."""
    for entries in journal:
        began = next(entry for entry in entries if isinstance(entry, RunBegan))
        folder = os.path.join(job, JOURNAL_DIR, f"i{began.incarnation:04d}-{began.run.hex()[:8]}")
        os.makedirs(folder)
        for number, start in enumerate(range(0, len(entries), segment_entries)):
            with open(os.path.join(folder, f"{number:06d}"), "wb") as file:
                file.write(segment(map(framed, entries[start : start + segment_entries])))
    return str(job)


def damage(job):
    """Flips a byte in the middle of the first segment."""
    found = sorted(os.path.join(at, name) for at, _, names in os.walk(os.path.join(job, JOURNAL_DIR)) for name in names)
    with open(found[0], "r+b") as file:
        data = file.read()
        file.seek(len(data) // 2)
        file.write(bytes([data[len(data) // 2] ^ 0xFF]))
    return found[0]
