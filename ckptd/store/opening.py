"""Opens a store by its URL: the only way in for the worker and the offline commands. Kinds are in ``stores.kinds``."""

import os

from ckptd.shared.base.errors import UsageError
from ckptd.shared.base.ids import JobKey
from ckptd.shared.format.integrity import XXH3, Integrity
from ckptd.shared.format.manifest import COMMITTED
from ckptd.shared.stores.kinds import kind_of, loaded, open_files
from ckptd.store.interface import Store

_HINT = "give a store, or a job's directory in it"


def open_store(url: str, integrity: Integrity) -> Store:
    """The store at the URL, which need not be there yet. Touches nothing. Raises UsageError for an unknown scheme."""
    made: Store = loaded(kind_of(url).store)(url, integrity)
    return made


def jobs_at(location: str) -> list[JobKey]:
    """The job that lies at the location, or all jobs of the store that does. Raises UsageError if it is neither."""
    head, name = os.path.split(location)
    try:
        if open_store(head, XXH3).has_job(name):  # names alone are looked at
            return [JobKey(head, name)]
        store = open_store(location, XXH3)
        jobs = [JobKey(location, job) for job in store.jobs() if store.has_job(job)]
    except OSError as error:
        raise UsageError(f"cannot list {location}: {error.strerror}", hint=_HINT) from None
    if jobs:
        return jobs
    if COMMITTED in open_files(location, XXH3).names():
        raise UsageError(f"{location} is one checkpoint", hint=f"ckptd verify {location}")
    raise UsageError(f"no checkpoint of any job in {location}", hint=_HINT)
