"""A trainer's checkpoints in directories of its own: staged, published by the daemon, read back from any tier."""

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from typing import Any

from ckptd.shared.base.errors import CkptdError, IntegrityError, RestoreError, SaveFailedError
from ckptd.shared.protocol.messages import End
from ckptd_client._load.files import RestoredFiles
from ckptd_client.client import Client
from ckptd_client.files import TrainerFile
from ckptd_client.handle import SaveHandle
from ckptd_client.integrations._kit.aside import Aside
from ckptd_client.integrations._kit.memory_directory import MemoryDirectory
from ckptd_client.integrations._kit.options import connect_with
from ckptd_client.integrations._kit.unproved import check_unproved, find_saved, was_ours

log = logging.getLogger("ckptd_client")
STORE = ".ckptd-store"  # beside a trainer's directories, where no option says another


class TrainerRun:
    """One training's use of ckptd. Made, used and closed by all ranks alike.

    place: the directory that the trainer's checkpoints lie in; made if it is missing. options: connect's arguments; the
    store is by default in the place, so that what is published there takes no second copy, and the job has its name.
    """

    def __init__(self, place: str, options: Mapping[str, Any]) -> None:
        place = os.path.abspath(place)
        os.makedirs(place, exist_ok=True)
        chosen = dict(options)
        if chosen.get("store") is None and not os.environ.get("CKPTD_STORE"):
            chosen["store"] = os.path.join(place, STORE)
        if chosen.get("job") is None and not os.environ.get("CKPTD_JOB"):
            chosen["job"] = _job_of(place)
        self.client: Client = connect_with(chosen)
        self._staged: dict[str, SaveHandle] = {}  # by directory, until it is known how they ended
        self._memory: MemoryDirectory | None = None
        self.aside = Aside()
        self._next, self._is_next_known = 0, False  # step of a save that is given none
        self.last = ""
        """The directory of the newest save."""

    # --- saves

    def save(
        self, files: Mapping[str, TrainerFile], directory: str, step: int | None, *, drain: bool = False
    ) -> SaveHandle:
        """Stages this rank's files of a checkpoint. Collective. Raises as Client.save_files does.

        step: or the next that is free. None for a trainer that has no numbers: one after all that there are, so that
        the newest has the highest.
        """
        self._look()
        step = self.client.free_step(self._number() if step is None else step)  # a trainer may save a step again
        handle = self.client.save_files(files, step, drain=drain, directory=directory)
        self._staged[directory] = handle
        self.last = directory
        return handle

    def _number(self) -> int:
        if not self._is_next_known:  # a load has gone back, or nothing was saved yet
            with contextlib.suppress(RestoreError):  # then the save will fail too, and say why
                self._next = max([self._next, *(step + 1 for step in self._steps())])
            self._is_next_known = True
        self._next += 1
        return self._next - 1

    def is_coming(self, directory: str) -> bool:
        """Whether the directory is there, or will be once it is drained."""
        self._look()
        return directory in self._staged or os.path.isdir(directory)

    def settle(self) -> None:
        """Blocks until the newest save is durable, each other one is or cannot be, and what is done aside is done.

        Raises nothing: logs what will not be durable, or may not be.
        """
        self.aside.join()
        if not self._staged:
            return
        try:
            self.client.wait("durable")
        except SaveFailedError as error:
            log.warning("ckptd: the last checkpoint is not durable: %s", error)
        except CkptdError as error:  # no daemon answers
            log.warning("ckptd: whether the last checkpoint is durable is not known: %s", error)
            return
        for handle in list(self._staged.values()):
            with contextlib.suppress(CkptdError):
                handle.wait("durable")
        self._look()

    def _look(self) -> None:
        """Says once of each save that it will not be published."""
        for directory, handle in list(self._staged.items()):
            if handle.end is None:
                continue
            if handle.end is not End.KEPT or directory != self.last:  # the newest may still be drained
                del self._staged[directory]
            if handle.end not in (End.DURABLE, End.KEPT):
                log.warning(
                    "ckptd: %s will not appear: its save ended as '%s' (%s)", directory, handle.end, handle.reason
                )

    # --- loads

    def agreed(self, word: str) -> str:
        """Rank 0's word. Collective."""
        exchange = self.client.group.exchange
        return exchange(word.encode())[0].decode() if exchange is not None else word

    def _steps(self) -> list[int]:
        """The steps that could be loaded, as rank 0's node knows them, the newest save first. Collective.

        Raises RestoreError, on all ranks, when no daemon answers.
        """
        said = ""
        if self.client.group.rank == 0:
            try:
                said = json.dumps(self.client.steps(by_save=True))
            except CkptdError as error:
                said = json.dumps(str(error))
        found = json.loads(self.agreed(said))
        if isinstance(found, str):
            raise RestoreError(f"which checkpoints there are is not known: {found}", hint="ckptd status")
        return list(found)

    def newest(self) -> RestoredFiles | None:
        """The newest checkpoint of the job, None when there is none of a trainer's files. Collective.

        None too when a published file was altered: its present content counts. With a key that raises
        IntegrityError: nothing proves it.
        """
        self._is_next_known = False
        return self._unaltered(_of_files(self.client.load_files()))

    def find(self, directory: str) -> RestoredFiles | None:
        """The newest one that was saved for the directory, None when ckptd has none, or it was altered. Collective.

        Raises RestoreError when no daemon can be asked. With a key it raises IntegrityError instead of None where it
        may be one that ckptd refused or has no more; None is then one that ckptd knows nothing of.
        """
        self._is_next_known = False
        files, refused = find_saved(self.client, self._steps(), lambda files: files.directory == directory)
        if files is not None:
            return self._unaltered(files)
        why = self.agreed(refused or was_ours(directory))
        if why:
            check_unproved(self.client, directory, why)
        return None

    def _unaltered(self, files: RestoredFiles | None) -> RestoredFiles | None:
        if files is None or not self.agreed("altered" if files.is_altered else ""):
            return files
        files.close()
        check_unproved(self.client, str(files.directory), "it was altered after it was saved")
        log.info("ckptd: %s was altered after it was saved, and is read as it is", files.directory)
        return None

    def bring(self, directory: str) -> str:
        """Has rank 0 write what was saved for the directory, which is not there. Empty, or why not. Collective."""
        try:
            files = self.find(directory)
        except (RestoreError, IntegrityError) as error:
            return str(error)
        if files is None:
            return "it was not saved"
        with files:
            return self.agreed(_written(files, directory) if self.client.group.rank == 0 else "")

    def open(self, files: RestoredFiles, at: str) -> str:
        """A directory with the files, until loaded() is called. Closes files. Collective. Raises RestoreError.

        at: where the trainer looks for them, by its own word: that of the checkpoint is only compared with it.
        """
        with files:
            self._memory = MemoryDirectory(files, self.client.group, at)
        log.info("ckptd: step %d is read from %s", files.step, files.tier)
        return self._memory.path

    def loaded(self) -> None:
        """Gives back the memory of what was opened, once all ranks have called it."""
        if self._memory is not None:
            self.agreed("")
            self._memory.close()
            self._memory = None

    def close(self) -> None:
        """Leaves the job; what was staged is drained all the same. Not collective."""
        if self._memory is not None:
            self._memory.close()
        self.client.close()


def _of_files(found: RestoredFiles | None) -> RestoredFiles | None:
    if found is not None and found.directory is None:
        found.close()
        return None
    return found


def _written(files: RestoredFiles, directory: str) -> str:
    """Empty when the directory is there, whole, else why not."""
    temp = os.path.join(os.path.dirname(directory), f".{os.path.basename(directory)}.tmp-{uuid.uuid4().hex}")
    try:
        files.write_to(temp)
        os.rename(temp, directory)
    except (CkptdError, OSError) as error:
        shutil.rmtree(temp, ignore_errors=True)
        return str(error)
    return ""


def _job_of(place: str) -> str:
    """The directory's name, and what makes it differ from others of that name."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", os.path.basename(place)).strip("-._")[:40]
    return f"{name or 'training'}-{hashlib.blake2b(place.encode(), digest_size=4).hexdigest()}"
