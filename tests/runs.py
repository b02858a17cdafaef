"""Run and store ids for tests."""

import os
from pathlib import Path

from ckptd.store.facts import Committer, Taker
from ckptd.store.posix.identity import STORE_FILE

RUN = bytes(range(1, 17))  # of every incarnation, where a test is about one run
OTHER_RUN = bytes(range(101, 117))
STORE_ID = "0123456789abcdef0123456789abcdef"
OTHER_STORE_ID = "fedcba9876543210fedcba9876543210"
SET = "e00000001-01234567"  # the directory of the redundancy set, where a test is about one
VOTES = tuple(f"sets/{SET}/node{number}." for number in range(4))  # how the places of its nodes' votes begin
TAKER = Taker(RUN, "session", "node")
COMMITTER = Committer(0, "", STORE_ID)  # of no session in particular


MANIFEST = "ckptd."  # how its name begins


def manifest_in(checkpoint: str | os.PathLike[str]) -> Path:
    """The only manifest there, finished or not."""
    return file_in(checkpoint, MANIFEST)


def vote_in(checkpoint: str | os.PathLike[str], node: int = 0) -> Path:
    """The only vote of one of the nodes, there, finished or not."""
    return file_in(checkpoint, VOTES[node])


def file_in(checkpoint: str | os.PathLike[str], name: str) -> Path:
    """A file of the checkpoint by its name, a vote by the beginning of its place, the manifest by that of its name."""
    place = Path(checkpoint) / name
    pattern = f"{place.name}*.manifest" if name == MANIFEST else f"{place.name}*.vote" if name in VOTES else place.name
    (found,) = place.parent.glob(pattern) if name in {MANIFEST, *VOTES} else [place]
    return found


def give_id(store: str | os.PathLike[str], store_id: str = STORE_ID) -> None:
    """The store's directory is there already; now it has this id."""
    with open(os.path.join(store, STORE_FILE), "w", encoding="utf-8") as file:
        file.write(f'{{"format":1,"store_id":"{store_id}"}}\n')
