"""A journal as it lies on a store."""

import os

from ckptd.shared.protocol.journal import JOURNAL_DIR, Name, RunBegan, framed, run_digits, segment


def write(job, journal, *, segment_entries=1000):
    """Puts the entries of each run below a job's directory; each segment begins with its run. Returns the directory."""
    os.makedirs(os.path.join(job, JOURNAL_DIR))
    for entries in journal:
        began = next(entry for entry in entries if isinstance(entry, RunBegan))
        for number, start in enumerate(range(0, len(entries), segment_entries)):
            name = Name(began.incarnation, run_digits(began.run), "0a0b0c0d", number)
            part = [began] * (number > 0) + entries[start : start + segment_entries]
            with open(os.path.join(job, name.path), "wb") as file:
                file.write(segment(map(framed, part)))
    return str(job)


def damage(job):
    """Flips a byte in the middle of the first segment."""
    folder = os.path.join(job, JOURNAL_DIR)
    path = os.path.join(folder, min(os.listdir(folder)))
    with open(path, "r+b") as file:
        data = file.read()
        file.seek(len(data) // 2)
        file.write(bytes([data[len(data) // 2] ^ 0xFF]))
    return path
