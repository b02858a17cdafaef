"""The store in a directory, as ``ckptd.store.interface`` has it: names to paths, each call in its own file beside."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

from ckptd.shared.base.ids import JobKey, SaveId, SetName, StoreId
from ckptd.shared.format.committed import TRASH_PREFIX
from ckptd.shared.format.integrity import XXH3, Integrity
from ckptd.shared.format.manifest import Vote
from ckptd.shared.format.together import Alive, silent
from ckptd.shared.protocol.publication import Intents, Publication
from ckptd.store.facts import CommitOutcome, Committer
from ckptd.store.image import Flow
from ckptd.store.interface import NO_INTENTS, Again, Held, OpenImage, Store
from ckptd.store.posix import again, commit, publish, removal
from ckptd.store.posix.identity import STORE_FILE, id_on_store, make_store, store_id_at, where
from ckptd.store.posix.image_writer import put_files
from ckptd.store.posix.in_the_way import explain
from ckptd.store.posix.probe import probe
from ckptd.store.posix.records import PosixRecords
from ckptd.store.posix.replacement import HeldDirectory
from ckptd.store.posix.scan import Place, job_dir, latest_name, save_at
from ckptd.store.records import JobRecords
from ckptd.system.files import FileLayer


class PosixStore(Store):
    """One in the directory ``url``. fs: the disk that it lies on, below that directory."""

    def __init__(self, url: str, integrity: Integrity = XXH3, fs: FileLayer | None = None) -> None:
        super().__init__(url, integrity)
        self._fs = FileLayer(url, integrity) if fs is None else fs

    def store_id(self, job: str = "") -> StoreId | None:
        found = store_id_at(self._fs, self.url)
        return found if found is not None or not job else id_on_store(self._fs, self.url, job)

    def make(self, store_id: StoreId | None) -> tuple[StoreId, list[str]]:
        return make_store(self._fs, self.url, store_id)

    def whereabouts(self) -> str:
        return where(self.url)

    def absence(self) -> str:
        if not os.path.isdir(self.url):
            return "there is no such directory"
        return f"the directory there has no {STORE_FILE}"

    def records(self, job: str) -> JobRecords:
        return PosixRecords(self._fs, self._key(job))

    def put_files(self, job: str, save: SaveId, folder: SetName, files: Sequence[OpenImage], flow: Flow) -> bool:
        return put_files(self._fs, self._place(job, save), folder, files, flow)

    def put_vote(self, job: str, vote: Vote) -> None:
        commit.write_vote(self._fs, self._key(job), vote)

    def commit(  # noqa: PLR0913 - whose checkpoint, by whom, and what follows
        self, job: str, save: SaveId, writer: str, by: Committer | None = None, intents: Intents = NO_INTENTS,
        *, alive: Alive = silent,
    ) -> CommitOutcome:  # fmt: skip
        if by is not None:
            self.check(by.store_id, job)
        return commit.commit(self._fs, self._key(job), save, writer, by, intents, alive=alive)

    def latest(self, job: str) -> str:
        return latest_name(self._fs, self._key(job))

    def remove(self, job: str, save: SaveId, intents: Intents = NO_INTENTS) -> bool:
        return removal.remove_checkpoint(self._fs, self._key(job), save, intents)

    def discard(self, job: str, save: SaveId) -> None:
        removal.remove_partial(self._fs, self._key(job), save)

    def sweep(self, job: str, *, all_of_it: bool = True) -> list[str]:
        key = self._key(job)
        removal.sweep_trash(self._fs, key, links=all_of_it)  # a link may be one that a daemon is about to make `latest`
        with contextlib.suppress(FileNotFoundError):
            return [f"{job_dir(key)}/{n}" for n in self._fs.listdir(job_dir(key)) if n.startswith(TRASH_PREFIX)]
        return []

    def publish(self, job: str, intents: Intents, own_part: SaveId | None = None) -> tuple[list[SaveId], list[str]]:
        if own_part is None:
            return publish.publish_left(self._fs, self._key(job), intents)
        note = publish.publish_own_part(self._fs, self._key(job), own_part, intents)
        done = not note and save_at(self._fs, self._key(job), own_part.dirname) == own_part
        return [own_part] if done else [], [note] if note else []

    def publish_to(self, job: str, name: str, to: Publication) -> list[str]:
        return publish.publish_to(self._fs, self._key(job), name, to)

    @contextlib.contextmanager
    def held(self, location: str) -> Iterator[Held]:
        with FileLayer(location, self.integrity).held() as fs:  # nothing outside of the directory is written
            yield HeldDirectory(fs, location)

    def commit_again(self, job: str, save: SaveId, writer: str) -> CommitOutcome:
        key, hidden = self._key(job), removal.whole_name(save)  # a sweep puts it back; an unfinished one it removes
        place = Place(key, save, hidden)
        self._fs.rename(place.final, place.partial)
        try:
            return commit.commit(self._fs, key, save, writer, hidden=hidden)
        except BaseException:
            with contextlib.suppress(OSError):
                self._fs.rename(place.partial, place.final)
            raise

    def made_again(self, job: str, save: SaveId, manifest: str) -> AbstractContextManager[Again]:
        return again.made_again(self._fs, self._key(job), save, manifest)

    def space(self) -> tuple[int, int]:
        return self._fs.space(self.url)

    def probe(self) -> Iterator[dict[str, object]]:
        return probe(self.url)

    def explain(self, error: OSError) -> tuple[str, str]:
        return explain(error, self.url)

    def _key(self, job: str) -> JobKey:
        return JobKey(self.url, job)

    def _place(self, job: str, save: SaveId) -> Place:
        return Place(self._key(job), save)
