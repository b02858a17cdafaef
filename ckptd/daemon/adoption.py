"""What an earlier daemon left: its slots, parity, topologies and live ranks, taken over at start. Touches no store."""

import logging
import os
from collections.abc import Callable

from ckptd.arena.arena import Arena, FoundSlot
from ckptd.arena.incarnation_numbers import Numbers
from ckptd.arena.known_stores import KnownStores
from ckptd.arena.saved_topology import kept_topologies
from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.core.jobs import Catalogue
from ckptd.daemon.liveness import Liveness, job_of
from ckptd.parity.files import Parities
from ckptd.shared.base.errors import ConfigError, IntegrityError, OtherVersionError
from ckptd.shared.base.ids import JobKey
from ckptd.shared.base.log_line import line
from ckptd.shared.files.integrity_key import integrity_of
from ckptd.shared.format import arena_paths
from ckptd.system.config import Config

log = logging.getLogger("ckptd")


def open_arena(config: Config) -> Arena:
    """The daemon's arena, open.

    Raises ConfigError, also when what is staged there is of another version, or has another key than it, or none.
    """
    arena = Arena(config.arena, config.budget_nbytes, integrity_of(config.integrity, config.integrity_key_file))
    arena.open()
    try:
        arena.scan()
        Parities(arena).scan()
    except (IntegrityError, OtherVersionError) as error:
        arena.close(remove=False)
        settings = "start the daemon with the settings it had: " if isinstance(error, IntegrityError) else ""
        hint = f"{settings}{error.hint}; or, to give up what is staged: rm -r {arena.path}"
        raise ConfigError(error.message, hint=hint) from None
    return arena


class Adoption:
    """``handle`` takes an event through the catalogue, ``perform`` does an action."""

    def __init__(  # noqa: PLR0913, PLR0917 - the daemon's parts
        self,
        arena: Arena,
        known_stores: KnownStores,
        parities: Parities,
        liveness: Liveness,
        catalogue: Catalogue,
        handle: Callable[[ev.Event], None],
        perform: Callable[[act.Action], None],
    ) -> None:
        self._arena = arena
        self._known_stores = known_stores
        self._parities = parities
        self._liveness = liveness
        self._catalogue = catalogue
        self._handle = handle
        self._perform = perform

    def run(self, now: float) -> list[str]:
        """Takes everything over; reports orphans."""
        jobs = self._kept()
        slots = self._arena.scan()
        for slot in slots:
            directory = os.path.join(self._arena.path, slot.job_dir)
            named = slot.seal.job or job_of(directory)  # before its first seal, a job is known by its ranks alone
            if named is not None and arena_paths.job_dir(named) == slot.job_dir:
                jobs[slot.job_dir] = named
        nameless = [slot for slot in slots if not self._slot(slot, jobs)]
        for job, chunk in self._parities.scan():
            if job in self._catalogue.jobs:
                self._handle(ev.ChunkAdopted(job=job, chunk=chunk))
            else:  # its topology was lost, and nothing else is here: nobody would ask for it, or ever give it back
                log.warning(line("parity of nothing here, removed", job=job.job, save=chunk.save))
                self._parities.give_back(job, chunk.save, chunk.epoch, keep=False)
        for directory, job in jobs.items():
            known = self._known_stores.of(job)
            if known is not None:
                self._handle(ev.StoreRemembered(job=job, store_id=known))
            self._look(job, os.path.join(self._arena.path, directory))
            for action in self._catalogue.adopted(job, now):
                self._perform(action)
        if slots:
            log.info(line("adopted", slots=len(slots) - len(nameless), jobs=len(jobs)))
        return [told for slot in nameless if (told := self._stray(slot))]

    def _kept(self) -> dict[str, JobKey]:
        """What small files of the arena say, reported first: the coordinator decides what is reported to which node."""
        for number in Numbers(self._arena.path).ahead():
            self._handle(ev.NumberKept(job=number.job, number=number.number))
        kept = kept_topologies(self._arena.path)
        for one in kept:
            kept_one = ev.TopologyKept(
                job=one.job,
                session=one.session,
                topology=one.topology,
                epoch=one.epoch,
                since=one.since,
                outside=one.outside,
                former=one.former,
            )
            self._handle(kept_one)
        return {arena_paths.job_dir(one.job): one.job for one in kept}

    def _slot(self, slot: FoundSlot, jobs: dict[str, JobKey]) -> bool:
        job = jobs.get(slot.job_dir)
        if job is None:
            return False
        self._arena.adopt_serial(job, slot.name)
        self._handle(
            ev.SlotAdopted(
                job=job,
                rank=slot.rank,
                slot=slot.name,
                capacity=slot.capacity,
                world_size=slot.seal.world_size,
                save=slot.seal.save if slot.seal.state != "free" else None,
                nbytes=slot.seal.image_nbytes,
                seal=slot.seal if slot.seal.state == "digested" else None,
                attestations=slot.seal.attestations,
            )
        )
        return True

    def _stray(self, slot: FoundSlot) -> str:
        if slot.seal.job is None:  # nothing in the job's directory was ever sealed: nobody can miss it
            self._arena.remove_stray(slot)
            return ""
        return f"slot {slot.job_dir}/{slot.name} belongs elsewhere; left alone"

    def _look(self, job: JobKey, directory: str) -> None:
        live, dead = self._liveness.look(directory)
        for rank in live:
            self._handle(ev.RankFound(job=job, rank=rank.rank, session=rank.session, pid=rank.pid, host=rank.host))
        for record in dead:  # while no daemon was there to see it
            self._handle(ev.RankGone(job=job, rank=record.rank, session=record.session))
