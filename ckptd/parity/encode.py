"""Makes this node's parity of a save: pulls the others' columns, solves, seals. Blocks; for threads."""

import contextlib

from ckptd.parity.engine import Progress, Pull
from ckptd.parity.files import Parities
from ckptd.parity.plan import at_home
from ckptd.parity.sources import Sources
from ckptd.parity.table import Table
from ckptd.shared.base.ids import JobKey
from ckptd.shared.protocol.parity_types import Piece
from ckptd.system import failpoints


def encode(parities: Parities, job: JobKey, piece: Piece, sources: Sources, progress: Progress) -> None:
    """Returns when the parity is sealed, at once when it was. Else raises, and nothing that counts is left.

    progress is told the bytes pulled since the last time. Raises PeerError, DamagedError, BudgetError, OSError.
    """
    if parities.sealed(job, piece.save, piece.epoch):
        return
    sources.cancel.check()  # it may have waited long for its thread
    failpoints.reach("encode.before-file")
    name = parities.make(job, piece)
    try:
        failpoints.reach("encode.file-made")
        view = parities.arena.view(job, name)
        where = at_home(piece)
        table = Table(where.code.parity_nbytes, parities.arena.integrity)
        for task in where.encode():
            Pull(sources, job, where, task, view, table, verify=True).run(progress, "encode.half-pulled")
        sources.cancel.check()
        parities.seal(job, name, piece, table.all(view))
    except BaseException:
        with contextlib.suppress(OSError):  # the job was forgotten meanwhile, and the file with it
            parities.give_back(job, piece.save, piece.epoch, keep=not sources.cancel.final)
        raise
