"""Ranks of a node that meet for a read, each in a thread; what they read and take."""

import contextlib
import threading
import time

from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.digest import BLOCK_NBYTES
from ckptd_client._load.shared_read.found import DifferentError, Found
from ckptd_client._load.shared_read.meeting import NodeReaders
from ckptd_client._load.shared_read.node_group import NodeGroup
from ckptd_client._load.shared_read.schedule import Blocks
from tests.runs import RUN

SAVE = SaveId(1, 1, 1, RUN)


def readers_of(directory, rank, readers, read="load.1.1", *, nodes=False, number=0):
    return NodeReaders(str(directory), "s", readers, rank, read, nodes, number)


def opened(here, total, *, content=b"mark", save=SAVE):
    """The group of a rank that has entered; None without memory."""
    entered = here.enter()
    if entered is None:
        return None
    return NodeGroup(entered, Blocks([BLOCK_NBYTES] * total), Found.of(here.rank, save, content, here.number))


def decline(here):
    entered = here.enter()
    entered.decline()
    entered.close()


def meet(directory, wants, total, readers=None):
    """The node groups of ranks that join at once; wants: blocks by rank."""
    readers = tuple(sorted(wants)) if readers is None else readers
    groups = {}

    def come(rank):
        group = opened(readers_of(directory, rank, readers), total)
        groups[rank] = group if group is not None and group.join(wants[rank]) else None

    threads = [threading.Thread(target=come, args=(rank,)) for rank in wants]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return groups


class Reader:
    """A rank that reads its blocks in a thread and takes what it wants in another."""

    def __init__(self, group, fail):
        self.group, self.fail = group, fail
        self.got, self.read = {}, []
        self.threads = [threading.Thread(target=self.fill), threading.Thread(target=self.take)]

    def fill(self):
        for one in self.group.own_reads:
            with contextlib.suppress(OSError):
                self.group.fill(one, lambda buffer, one=one: self.into(buffer, one.block))

    def into(self, buffer, block):
        if block in self.fail:
            raise OSError("no")
        self.read.append(block)
        buffer.view[0] = block % 251

    def take(self):
        for one in self.group.shared:
            buffer = self.group.take(one)
            self.got[one.block] = None if buffer is None else buffer.view[0]
            self.group.release(one)
        self.threads[0].join()
        self.group.leave()


def read_all(groups, fail=()):
    """What each rank took, by block: the byte that its reader wrote, None for nothing; and who read each block."""
    ranks = {rank: Reader(group, fail) for rank, group in groups.items()}
    threads = [thread for reader in ranks.values() for thread in reader.threads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    got = {rank: reader.got for rank, reader in ranks.items()}
    return got, {block: rank for rank, reader in ranks.items() for block in reader.read}


def joined(
    directory, rank, readers, *, wants=frozenset({0, 1, 2}), after_s=0.0, nodes=False, meet_nodes=None, content=b"m",
    number=0, save=SAVE, total=3, read="load.1.1",
):  # fmt: skip
    """A thread that joins after so many seconds; its outcome, and how long the join itself took."""
    found = {}

    def come():
        time.sleep(after_s)
        here = readers_of(directory, rank, readers, read, nodes=nodes, number=number)
        group = opened(here, total, content=content, save=save)
        began = time.monotonic()
        try:
            found["joined"] = group.join(wants, meet_nodes)
        except (OSError, DifferentError) as error:
            found["joined"], found["error"] = None, error
        found["took"] = time.monotonic() - began
        found["group"] = group

    thread = threading.Thread(target=come)
    thread.start()
    return thread, found


def outcomes(*threads):
    for thread, _ in threads:
        thread.join()
    return [found for _, found in threads]
