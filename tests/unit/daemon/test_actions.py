"""Every action of the core has a row in the daemon's table."""

from ckptd.arena.arena import Arena
from ckptd.core import actions as act
from ckptd.daemon.action_executor import ActionExecutor
from ckptd.daemon.journals import Journals
from ckptd.daemon.loop import Daemon
from ckptd.daemon.parity_executor import ParityExecutor
from ckptd.daemon.scrubbing import ScrubExecutor


class Parts(Daemon):
    """A daemon's parts, of which none is started."""

    def __init__(self, arena):
        self._executor = ActionExecutor(
            node="a", arena=arena, known_stores=None, stores=None, digesting=None, allocating=None, cleaning=None,
            deliver=None, store_timeout_s=1.0, bandwidth=0,
        )  # fmt: skip
        self._protect = ParityExecutor(
            node="a", arena=arena, peers=None, encoding=None, fetching=None, cleaning=None, deliver=None
        )
        self._plane = self._gateway = self._executor
        self._scrubs = ScrubExecutor(arena, None, None, None, 0)
        self._journals = Journals(arena.path, None, None, uses=None, marks=None)


def test_every_action_is_carried_out(tmp_path):
    parts = Parts(Arena(str(tmp_path)))
    try:
        parts._plane.carry = parts._plane.send = None
        kinds = {one for one in vars(act).values() if isinstance(one, type) and issubclass(one, act.Action)}
        assert {*parts._table()} == kinds - {act.Action}
    finally:
        parts._executor.boards.work.close()
        parts._scrubs.work.close()
