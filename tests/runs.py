"""Run and store ids for tests."""

import os

from ckptd.store.facts import Committer, Taker
from ckptd.store.posix.identity import STORE_FILE

RUN = bytes(range(1, 17))  # of every incarnation, where a test is about one run
OTHER_RUN = bytes(range(101, 117))
STORE_ID = "0123456789abcdef0123456789abcdef"
OTHER_STORE_ID = "fedcba9876543210fedcba9876543210"
SET = "e00000001-01234567"  # the directory of the redundancy set, where a test is about one
VOTES = tuple(f"sets/{SET}/node{number}.vote" for number in range(4))  # of its nodes
TAKER = Taker(RUN, "session", "node")
COMMITTER = Committer(0, "", STORE_ID)  # of no session in particular


def give_id(store: str | os.PathLike[str], store_id: str = STORE_ID) -> None:
    """The store's directory is there already; now it has this id."""
    with open(os.path.join(store, STORE_FILE), "w", encoding="utf-8") as file:
        file.write(f'{{"format":1,"store_id":"{store_id}"}}\n')
