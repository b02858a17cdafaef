"""What the bulk server serves: the sealed segments and parity of an arena, each block checked before it counts."""

from ckptd.arena.arena import Arena
from ckptd.parity.files import open_parity
from ckptd.parity.streams import TAIL, block_range, cuts
from ckptd.shared.base.errors import DamagedError, PeerError
from ckptd.shared.base.ids import JobKey
from ckptd.shared.bulk import wire
from ckptd.shared.bulk.server import Served
from ckptd.shared.format.digest import DIGEST_NBYTES


class ServedSegment:
    """A digested slot. Holds its memory while it lives."""

    def __init__(self, arena: Arena, job: JobKey, slot: str) -> None:
        self._arena, self._job, self._slot = arena, job, slot
        self._view = arena.view(job, slot)
        self.seal = arena.seal_of(job, slot)
        self.nbytes = self.seal.content_nbytes
        self._checked: set[int] = set()

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Bytes of image and tail."""
        return self._view[offset : offset + nbytes]

    def check(self, offset: int, nbytes: int) -> None:
        """Raises DamagedError that names slot and block, or part of the tail."""
        for block, _, _ in cuts(self.seal, offset, offset + max(nbytes, 1)):
            if block not in self._checked:
                self._check(block)
                self._checked.add(block)

    def _check(self, block: int) -> None:
        if block == TAIL:
            self._arena.fragments(self._job, self._slot)
            return
        start, stop = block_range(self.seal, block)
        at = self.seal.table_offset + block * DIGEST_NBYTES
        if self._arena.integrity.digest(self._view[start:stop]) != self._view[at : at + DIGEST_NBYTES]:
            raise DamagedError(f"slot {self._slot} block {block} does not match its digest")

    def still(self) -> bool:
        """Whether it holds what it held."""
        try:
            return self._arena.seal_of(self._job, self._slot) == self.seal
        except FileNotFoundError:
            return False


def open_served(arena: Arena, ask: wire.Ask, rank: int) -> Served:
    """The segment or parity that is asked for. Raises PeerError when it is not here, DamagedError."""
    if rank == wire.PARITY:
        parity = open_parity(arena, ask.job, ask.save, ask.epoch)
        if parity is None:
            raise PeerError(f"no parity of {ask.save} for incarnation {ask.epoch} here")
        return parity
    slot = arena.slot_of(ask.job, rank, ask.save)
    if slot is None:
        raise PeerError(f"no segment of rank {rank} of {ask.save} here")
    return ServedSegment(arena, ask.job, slot)
