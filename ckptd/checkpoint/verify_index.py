"""Checks the index of a checkpoint's records: it says what they say."""

from ckptd.shared.base.errors import DamagedError
from ckptd.shared.format.committed import Opened
from ckptd.shared.format.stored_records import index_bytes
from ckptd.store.record_index import index_of


def index_problem(opened: Opened) -> str:
    """What is wrong with the index that the manifest pins; empty: nothing. The votes must have been asked for."""
    manifest = opened.manifest
    assert manifest is not None and manifest.index is not None  # noqa: S101, PT018 - the caller has checked
    where = opened.files.where(manifest.index.name)
    try:
        found = index_bytes(opened.files, manifest.index)
    except DamagedError as error:
        return error.message.removeprefix(f"{where}: ")
    except OSError as error:
        return "missing" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
    if len(opened.records) == manifest.world_size and found != index_of(opened.votes):
        return "says something else than the records"
    return ""
