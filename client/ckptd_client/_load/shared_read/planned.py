"""A cooperative read of ranks that no daemon brings together: their plans say who they are, one of them assigns places.

A planner that gathers the plans of all ranks of a load carries an offer of each, and a place back. So this costs no
message of its own, and a rank that loads alone, whatever process group there is, finds no other offer.
"""

import contextlib
import ipaddress
import logging
import os
import shutil
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

from ckptd.shared.base.ids import JobKey
from ckptd.shared.files.mounts import SHARED_MEMORY
from ckptd.shared.format.integrity import Integrity
from ckptd.shared.format.stored_records import StoredRecords
from ckptd.shared.protocol.messages import PlaceKnown
from ckptd.shared.protocol.read_tree import ExchangeAddress, Place
from ckptd_client._load.shared_read.found import DifferentError, Found
from ckptd_client._load.shared_read.meeting import NodeReaders
from ckptd_client._load.shared_read.own_address import own_address
from ckptd_client._load.shared_read.participants import Participants
from ckptd_client._load.shared_read.peer_exchange import PeerExchange
from ckptd_client._local.rank import Group

log = logging.getLogger("ckptd_client")
_BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"
READS: Final = "ckptd-read-"  # then the user, and the session
UNUSED_S: Final = 600.0  # of a port, from a rank's plan until it reads: another rank failed, or is late
_OLD_S: Final = 3600.0  # of a directory in which ranks were killed: those of a read meet within a minute


class Offer(NamedTuple):
    """What a rank says of itself. found: which checkpoint, in any case.

    Ranks of one home share memory; empty: it has none. exchange: where it could send blocks to others.
    """

    found: Found
    machine: str = ""
    home: str = ""
    exchange: ExchangeAddress | None = None


class Assigned(NamedTuple):
    """A rank's part in the read."""

    rank: int  # in the order of the plans
    session: str  # names the read
    readers: tuple[int, ...]  # of its home: first the one that exchanges blocks with others, if one does
    place: Place | None  # of its home among those that exchange blocks; None: no other home takes part
    parent: ExchangeAddress | None


def refuse_different(offers: Sequence[Offer]) -> None:
    """Raises DifferentError where ranks found different checkpoints. Pure."""
    for one in offers:
        if one.found.mark != offers[0].found.mark:
            raise DifferentError(offers[0].found, one.found)


def assign(offers: Sequence[Offer], session: str) -> list[Assigned]:
    """The part of each, of ranks that found the same. session: names the read, and no other one. Pure."""
    several = len({one.machine for one in offers}) > 1
    homes: dict[str, list[int]] = {}
    for rank, one in enumerate(offers):
        homes.setdefault(_home(rank, one), []).append(rank)
    addresses = [one.exchange if not several or not _is_loopback(one.exchange) else None for one in offers]
    readers = {home: sorted(ranks, key=lambda rank: (addresses[rank] is None, rank)) for home, ranks in homes.items()}
    nodes = [ranks[0] for ranks in readers.values() if addresses[ranks[0]] is not None]
    numbers = {rank: number for number, rank in enumerate(nodes)} if len(nodes) > 1 else {}
    found = []
    for rank, one in enumerate(offers):
        here = readers[_home(rank, one)]
        place = Place(numbers[here[0]], len(nodes)) if here[0] in numbers else None
        above = place.parent if place is not None else None
        parent = None if above is None else addresses[nodes[above]]
        found.append(Assigned(rank, session, tuple(here), place, parent))
    return found


def _home(rank: int, one: Offer) -> str:
    return one.home or f"of rank {rank} alone"


def _is_loopback(address: ExchangeAddress | None) -> bool:
    return address is not None and ipaddress.ip_address(address.host).is_loopback


class Offered:
    """This rank's offer, until it is closed. Opens a port for other nodes, where there are any and it has an address.

    Where there is no shared memory it says which checkpoint was found, and nothing else. Blocks for the resolver.
    """

    def __init__(self, records: StoredRecords, group: Group, integrity: Integrity) -> None:
        manifest = records.manifest
        self._job = JobKey(f"/{manifest.store_id}", manifest.job)  # the store's path may differ between nodes
        self.exchange: PeerExchange | None = None
        found = Found.of(group.rank, manifest.save, records.proof, 0)
        self.offer = Offer(found)
        try:
            with open(_BOOT_ID, encoding="ascii") as file:
                machine = file.read().strip()
            memory, arena = os.stat(SHARED_MEMORY), os.environ.get("CKPTD_ARENA", "")
        except OSError as error:
            log.info("ckptd: rank %d reads by itself: %s", group.rank, error)
            return
        alone = os.environ.get("LOCAL_WORLD_SIZE") == str(group.world_size)
        host = "" if alone else own_address()
        try:
            if host:
                self.exchange = PeerExchange(host, self._job, manifest.save, found, integrity, unused_s=UNUSED_S)
        except (OSError, RuntimeError) as error:
            log.warning("ckptd: no port at %s to read the store together with other nodes: %s", host, error)
        home = f"{machine} {memory.st_dev} {memory.st_ino} {os.geteuid()} {arena}"
        self.offer = Offer(found, machine, home, self.exchange.address if self.exchange is not None else None)

    def participants(self, part: Assigned) -> Participants:
        """This rank's part in the read, to be entered. It closes this when it leaves."""
        directory = f"{SHARED_MEMORY}/{READS}{os.geteuid()}-{part.session}"
        several = part.place is not None
        here = NodeReaders(directory, part.session, part.readers, part.rank, part.session, nodes=several)

        def find_place(own: ExchangeAddress | None, _number: int) -> PlaceKnown:
            if own is None or part.place is None:
                return PlaceKnown(reply_to=0)
            return PlaceKnown(reply_to=0, number=part.place.number, count=part.place.nodes, parent=part.parent)

        found = _Planned(self._job, here, find_place=find_place, offered=self)
        if not here.is_leader:
            self.close()
        elif several and self.exchange is not None and not self.exchange.use():
            text = "ckptd: warning: rank %d reads without other nodes: another came to the load more than %d s later"
            log.warning(text, self.offer.found.rank, UNUSED_S)
        return found

    def close(self) -> None:
        """Nothing is sent to other nodes any more. Idempotent."""
        if self.exchange is not None:
            self.exchange.close()


@dataclass
class _Planned(Participants):
    """Those of a plan: they meet in a directory of their own, which the last one removes."""

    offered: Offered | None = None

    def __enter__(self) -> Self:
        try:
            _make(self.here.directory)
        except OSError as error:
            log.info("ckptd: rank %d reads by itself: %s", self.here.rank, error)
            return self
        super().__enter__()
        return self

    def leave(self) -> None:
        """As Participants."""
        super().leave()
        if self.offered is not None:
            self.offered.close()
        with contextlib.suppress(OSError):  # another rank is still to come, or has removed it
            os.rmdir(self.here.directory)

    def open_exchange(self, _found: Found, _integrity: Integrity) -> PeerExchange | None:
        """As Participants: the one whose address others have."""
        return self.offered.exchange if self.offered is not None else None


def _make(directory: str) -> None:
    """A directory of this user alone. Raises OSError. Removes those in which ranks were killed."""
    folder, own = os.path.split(directory)
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if name.startswith(own.rpartition("-")[0] + "-"):
            with contextlib.suppress(OSError):
                if time.time() - os.lstat(path).st_mtime > _OLD_S:
                    shutil.rmtree(path, ignore_errors=True)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    found = os.lstat(directory)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{directory} is another user's")
