"""A committed checkpoint made again, with less in it: another directory is written and takes its name.

Until then the committed one stays as it is; a crash at any step leaves one of the two under the name, or the whole one
aside, which the next sweep of the job puts back (``removal.restore_whole``). The other directory has a name of its own
that no scan knows: two processes that make one checkpoint again, and a daemon's look, leave each other's alone.
"""

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator

from ckptd.shared.base.errors import CkptdError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.committed import identify
from ckptd.shared.format.manifest import COMMITTED, LINKED, UNPUBLISHED, Vote
from ckptd.store.posix.commit import put_vote, write_records
from ckptd.store.posix.removal import LESS_PREFIX, discard, restore_whole, whole_name
from ckptd.store.posix.replacement import HeldDirectory
from ckptd.store.posix.scan import Place, files_at, of_job
from ckptd.store.scan import pinned
from ckptd.system import failpoints
from ckptd.system.files import FileLayer


@contextlib.contextmanager
def made_again(fs: FileLayer, key: JobKey, save: SaveId, manifest: str) -> Iterator["DirectoryAgain"]:
    """A new directory beside the committed checkpoint, empty. It goes, unless it has taken the place."""
    place = Place(key, save, f"{LESS_PREFIX}{save.dirname}-{secrets.token_hex(6)}")
    fs.mkdir(place.partial)
    try:
        fs.fsync_dir(place.job_dir)
        with FileLayer(place.partial, fs.integrity).held() as held:
            yield DirectoryAgain(fs, held, place, manifest)
    finally:
        with contextlib.suppress(CkptdError, OSError):  # a sweep finds it
            discard(fs, place.partial)


class DirectoryAgain(HeldDirectory):
    """As Again."""

    def __init__(self, fs: FileLayer, held: FileLayer, place: Place, manifest: str) -> None:
        super().__init__(held, place.partial)
        self._fs, self._place, self._manifest = fs, place, manifest

    def seal(self, votes: Iterable[Vote], writer: str) -> None:
        """As Again."""
        committed_s = self._fs.mtime(os.path.join(self._place.final, COMMITTED))
        for vote in votes:
            put_vote(self._fs, self._place, vote)
        write_records(self._fs, self._place, writer)
        path = os.path.join(self._place.partial, COMMITTED)
        self._fs.set_mtime(path, committed_s)  # it is what people see as its age

    def take_its_place(self) -> str:
        """As Again."""
        fs, place = self._fs, self._place
        aside = os.path.join(place.job_dir, whole_name(place.save))
        self._look_at(place.final)
        failpoints.reach("drop.before-aside")
        try:
            fs.rename(place.final, aside)
            fs.fsync_dir(place.job_dir)
            failpoints.reach("drop.after-aside")
            self._look_at(aside)  # now nobody finds it, to pin it or to link to it
            fs.rename(place.partial, place.final)
        except BaseException:
            with contextlib.suppress(OSError):  # what did not get so far, and what a daemon's sweep has put back
                fs.rename(aside, place.final)
            raise
        try:
            fs.fsync_dir(place.job_dir)
            failpoints.reach("drop.after-rename")
            restore_whole(fs, place.key, os.path.basename(aside))
        except (CkptdError, OSError) as error:
            return f"{place.final} has lost the part; of the whole one something is left: {error}"
        return ""

    def _look_at(self, path: str) -> None:
        """Raises CkptdError where it is not the one that was made again, or must stay whole by now."""
        place = self._place
        found = identify(files_at(self._fs, path), job=place.key.job, save=place.save)
        names = self._fs.listdir(path)
        why = ""
        if found.manifest != self._manifest:
            why = "was made again meanwhile by somebody else"
        elif UNPUBLISHED in names or LINKED in names:
            why = "was published meanwhile: a trainer's directory has links to it, or is to get them: it stays whole"
        elif place.save.dirname in pinned(of_job(self._fs, place.key)):
            why = "was pinned meanwhile: it stays whole"
        if why:
            raise CkptdError(f"{place.final} {why}", hint=f"see what is there: ckptd list {place.job_dir}")
