"""The files of a checkpoint that stock readers need beside the images, made from the votes. ckptd never reads them."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ckptd.shared.base.errors import DamagedError
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.layout import Layout
from ckptd.shared.format.manifest import (
    STOCK_FILES,
    STOCK_METADATA,
    STOCK_OBJECTS,
    FileRecord,
    StockName,
    StockObjects,
    Vote,
    one_record_each,
)
from ckptd.shared.format.packed_layout import Glance, Known, glance, layout_in
from ckptd.shared.format.together import Alive, silent
from ckptd.shared.torchfile.dcp_metadata import TooManyBoxesError, check_count, metadata_bytes
from ckptd.store.trainer_files import index_of


class Stock(NamedTuple):
    """Name and content of each file. ``left_out``: why `.metadata` is none of them, though it was asked for."""

    files: dict[StockName, bytes]
    left_out: str = ""


def stock_files(votes: Iterable[Vote], save: SaveId, alive: Alive = silent) -> Stock:
    """What stock readers are given: none of it for images that they cannot open.

    The same for all votes that add up to this save, whichever node has how many of its ranks.
    """
    votes = list(votes)
    objects = _objects(votes)
    records = one_record_each(votes)
    files: dict[StockName, bytes] = {} if objects is None else {STOCK_OBJECTS: objects.data}
    try:
        if any(record.raw for record in records):  # by the seals: no layout is decoded to find that there is none
            trainers = index_of(_layouts(records, alive), save.text)
            return Stock(files if trainers is None else files | {STOCK_FILES: trainers})
        _check_count(records, alive)
        index = objects.index if objects else {}
        metadata = metadata_bytes(
            _layouts(records, alive), index, checkpoint_id=save.dirname, save_id=save.text, alive=alive
        )
    except DamagedError:
        return Stock(files)  # a layout that nobody can read is no reason to refuse the data
    except TooManyBoxesError as error:
        return Stock(files, error.message)
    return Stock(files if metadata is None else files | {STOCK_METADATA: metadata})


def _check_count(records: Iterable[FileRecord], alive: Alive) -> None:
    """Raises TooManyBoxesError, before a box is looked at, where stock readers can open the images."""
    seen: dict[bytes, Glance] = {}  # ranks with the same boxes have one form
    for record in records:
        if record.form not in seen:
            seen[record.form] = glance(record.layout, record.name)
        alive()
    if all(one.archived for one in seen.values()):
        check_count(sum(seen[record.form].boxes for record in records))


def _objects(votes: list[Vote]) -> StockObjects | None:
    made = (vote.stock_objects for vote in votes if any(record.rank == 0 for record in vote.files))
    return next((objects for objects in made if objects is not None), None)


def _layouts(records: list[FileRecord], alive: Alive) -> Iterator[Layout]:
    """One at a time: those of a large job fill gigabytes."""
    known = Known()
    for record in records:
        yield layout_in(record.layout, where=record.name, known=known)
        alive()
