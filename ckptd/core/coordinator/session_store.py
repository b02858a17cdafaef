"""To which store a session is saved: the one that it asks for, that arenas remember, or that lies at the path. Pure."""

from collections.abc import Iterable

from msgspec.structs import replace

from ckptd.core import events as ev
from ckptd.core.actions import Claim, ScanStore
from ckptd.shared.base.ids import ANY_STORE, JobKey


class SessionStore:
    """Of the present session of a job."""

    def __init__(self, job: JobKey) -> None:
        self._job = job
        self.id = ""  # of the store that the session is saved to; empty: it has not answered yet
        self.asked = ""  # that the session asks for, or says that it is saved to
        self.remembered: set[str] = set()  # ids of stores that arenas have for the job
        self.floor = 0  # the largest incarnation of a save there

    def remember(self, store_id: str) -> None:
        """An arena has the store to which the job was saved; empty: it has none."""
        self.remembered |= {store_id} - {""}

    def has(self, incarnations: Iterable[int]) -> None:
        """Saves of these lie there."""
        self.floor = max([self.floor, *incarnations])

    @property
    def wanted(self) -> str:
        """The one store that the session may be saved to; empty: none in particular yet."""
        return self.id or self.asked

    def reported(self, store_id: str) -> None:
        """A rank that came back says to which its session is saved: it knows, and not all do."""
        if store_id not in ("", ANY_STORE, self.id):
            self.id, self.asked = "", store_id
        self.asked = self.asked or store_id

    def takes(self, store_id: str) -> bool:
        """Whether the session may be saved to this store."""
        return self.wanted in ("", ANY_STORE, store_id)

    def took(self, seen: ev.StoreScanned) -> ev.StoreScanned:
        """The session is saved to the store that answered, if it may be; else its ``problem`` says why not."""
        here, there, problem = seen.store_id, self._job.store, ""
        if self.takes(here):
            self.id = here
        else:
            problem = f"another store lies at {there} than the job is saved to: {here}, not {self.wanted}"
        return replace(seen, problem=problem, former=tuple(sorted(self.remembered - {here})))

    def scan(self, claim: Claim | None, *, make: bool) -> ScanStore:
        """Asks what lies on the store, after the claim is on record.

        A session that has seen none yet is saved to one that is remembered, if any is, and to no other.
        """
        return ScanStore(
            job=self._job, remembered=tuple(sorted(self.remembered)), wanted=self.wanted, make=make, claim=claim
        )
