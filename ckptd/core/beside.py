"""Around the parts of a job that work beside its saves and loads: a bug of one costs these no order. Pure."""

from collections.abc import Callable
from itertools import islice
from traceback import extract_tb

from ckptd.core.actions import Action, Note
from ckptd.shared.base.ids import JobKey

_MOST_TOLD = 64
_MAX_CHARS = 500


class Beside:
    """Tests set ``strict``, of all of the process: then a bug is raised."""

    strict = False

    def __init__(self) -> None:
        self._told: dict[tuple[JobKey, str], None] = {}  # bugs that were noted, the oldest first

    def __call__(self, job: JobKey, what: str, turn: Callable[[], list[Action]]) -> list[Action]:
        """What the part has to do; a note, the first time, when it raises."""
        try:
            return turn()
        except Exception as error:
            if self.strict:
                raise
            return self._noted(job, what, error)

    def _noted(self, job: JobKey, what: str, error: Exception) -> list[Action]:
        *_, last = extract_tb(error.__traceback__)
        where = f"{last.filename.rpartition('/')[2]}:{last.lineno}"
        text = f"a bug of ckptd's in the {what} ({where}): {type(error).__name__}: {error}"[:_MAX_CHARS]
        if (job, text) in self._told:
            return []
        self._told[job, text] = None
        for oldest in list(islice(self._told, max(0, len(self._told) - _MOST_TOLD))):
            del self._told[oldest]
        return [Note(job=job, text=text)]
