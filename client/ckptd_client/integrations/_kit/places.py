"""Where the saves of one training are to appear, and what is to be removed once they have."""

import logging
import os
from collections.abc import Mapping
from typing import NamedTuple

from ckptd.shared.base.errors import CkptdError
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.origin import Origin
from ckptd.shared.protocol.messages import End
from ckptd.shared.protocol.publication import MAX_DRAFTS, Draft
from ckptd_client.client import Client, staging_of
from ckptd_client.handle import SaveHandle
from ckptd_client.integrations._kit.aside import Aside
from ckptd_client.integrations._kit.drafts import discard, finish, is_published, prepare, publish, remove

log = logging.getLogger("ckptd_client")


class _Coming(NamedTuple):
    draft: Draft
    handle: SaveHandle


class Places:
    """One rank has it, for all. The daemon publishes; this looks what has become of it with each call."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._coming: list[_Coming] = []
        self._doomed: dict[str, SaveHandle | None] = {}  # by place, the save that is to be there before it goes
        self._arrived: set[SaveId] = set()  # saves with a place that is there
        self._going: list[str] = []  # places that are being removed aside
        self._newest: SaveHandle | None = None
        self._folders: set[str] = set()
        self._aside = Aside()

    def expect(self, draft: Draft, files: Mapping[str, bytes], handle: SaveHandle) -> None:
        """The place appears, with these files, when the save is durable. Before it is staged on all ranks. OSError."""
        if draft.place in self._going:
            self._aside.join()
        prepare(draft, Origin.of(staging_of(self._client).job, handle.save_id), files)
        self._coming.append(_Coming(draft, handle))
        self._newest = handle
        self._doomed.pop(draft.place, None)
        self._folders.add(os.path.dirname(draft.place))
        self._look()

    def expect_too(self, draft: Draft, files: Mapping[str, bytes], handle: SaveHandle) -> None:
        """One more place of a save that was expected elsewhere. Does not wait for the store. OSError, CkptdError."""
        self.expect(draft, files, handle)
        publish(self._client, handle.save_id, draft, wait=False)

    def remove(self, place: str) -> None:
        """The place is emptied, once a save that was expected before is there: the last one never goes for nothing."""
        self._doomed[place] = self._newest
        self._look()

    def _look(self) -> None:
        for each in [each for each in self._coming if each.handle.end not in {None, End.KEPT}]:
            draft, handle = each
            if handle.end is not End.DURABLE:
                self._give_up(draft, handle, f"its save ended as '{handle.end}' ({handle.reason})")
            elif is_published(draft):
                self._arrived.add(handle.save_id)
            elif len(self._coming) <= MAX_DRAFTS:
                continue  # the daemon is about to, or tries again when it looks at the store
            else:
                self._give_up(draft, handle, "the daemon could not publish it: see ckptd status")
            self._coming.remove(each)
        for place, after in self._doomed.items():
            if after is not None and after.end not in {None, End.DURABLE}:
                self._doomed[place] = self._newest
        gone = [place for place, after in self._doomed.items() if after is None or after.save_id in self._arrived]
        if gone and self._aside.run(lambda: _remove(gone)):
            self._going = gone
            for place in gone:
                del self._doomed[place]

    @staticmethod
    def _give_up(draft: Draft, handle: SaveHandle, why: object) -> None:
        """What may still be published stays for the daemon, or for the next run."""
        log.warning("ckptd: %s does not appear: %s", draft.place, why)
        if handle.end not in {None, End.DURABLE}:
            try:
                discard(draft.path)
            except OSError as error:
                log.warning("ckptd: %s is not removed: %s", draft.path, error)

    def still(self) -> None:
        """Blocks until nothing is being removed."""
        self._aside.join()

    def settle(self) -> None:
        """Blocks until each expected place is there or cannot appear, and until the places to remove are gone."""
        while self._coming:
            draft, handle = self._coming.pop(0)
            try:
                handle.wait("durable")
                publish(self._client, handle.save_id, draft)
                self._arrived.add(handle.save_id)
            except CkptdError as error:
                self._give_up(draft, handle, error)
        self._aside.join()
        self._look()
        self._aside.join()
        if self._doomed:
            log.warning("ckptd: kept, since a later checkpoint failed: %s", ", ".join(self._doomed))
        for folder in self._folders:
            self.finish(folder)

    def finish(self, folder: str) -> None:
        """What an earlier run has left in the folder, as drafts.finish. Logs what cannot be read or removed."""
        try:
            finish(self._client, folder, {each.handle.save_id for each in self._coming})
        except OSError as error:
            log.warning("ckptd: drafts of an earlier run in %s are left: %s", folder, error)


def _remove(places: list[str]) -> None:
    for place in places:
        try:
            remove(place)
        except OSError as error:
            log.warning("ckptd: %s is not removed: %s", place, error)
