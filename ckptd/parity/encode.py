"""Makes this node's parity of a save: pulls the others' columns, solves, seals. Blocks; for threads."""

import contextlib

from ckptd.parity.engine import Progress, Pull
from ckptd.parity.files import Parities
from ckptd.parity.plan import at_home
from ckptd.parity.sources import Sources
from ckptd.parity.table import Table
from ckptd.shared.base.ids import JobKey
from ckptd.shared.protocol.parity_types import ParityChunk
from ckptd.system import failpoints


def encode(parities: Parities, job: JobKey, parity_chunk: ParityChunk, sources: Sources, progress: Progress) -> None:
    """Returns when the parity is sealed, at once when it was. Else raises, and nothing that counts is left.

    progress gets the bytes pulled since the last call. Raises PeerError, DamagedError, BudgetError, OSError.
    """
    if parities.sealed(job, parity_chunk.save, parity_chunk.epoch):
        return
    sources.cancel.check()  # it may have waited long for its thread
    failpoints.reach("encode.before-file")
    name = parities.make(job, parity_chunk)
    try:
        failpoints.reach("encode.file-made")
        view = parities.arena.view(job, name)
        where = at_home(parity_chunk)
        table = Table(where.code.parity_nbytes, parities.arena.integrity)
        for task in where.encode():
            Pull(sources, job, where, task, view, table, verify=True).run(progress, "encode.half-pulled")
        sources.cancel.check()
        parities.seal(job, name, parity_chunk, table.all(view))
    except BaseException:
        with contextlib.suppress(OSError):  # the job was forgotten meanwhile, and the file with it
            parities.give_back(job, parity_chunk.save, parity_chunk.epoch, keep=not sources.cancel.final)
        raise
