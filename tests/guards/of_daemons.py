"""Guards of one daemon: its life, its stores, its keys, its memory, and what it forgets."""

from tests.guards.guard import fault_guard as _row

_CLIENT = "client/ckptd_client/"
_DAEMON = "ckptd/daemon/"

_DAEMONS = (
    _row(
        "a-daemon-looks-for-its-arena", f"{_DAEMON}loop.py",
        "self._homeless = not self._arena.in_place()", "self._homeless = False",
        "daemon_death.py::test_a_daemon_whose_arena_was_removed_makes_room_for_another",
    ),
    _row(
        "connect-may-start-no-daemon", f"{_CLIENT}_daemon/reach.py",
        "    if here:\n", "    if True:\n",
        "daemon_death.py::test_without_a_daemon_connect_says_so_when_it_may_not_start_one",
    ),
    _row(
        "an-empty-daemon-leaves", f"{_DAEMON}loop.py",
        "if not self._config.exit_when_empty or busy:", "if True:",
        "daemon_death.py::test_a_client_starts_a_daemon_and_says_so_and_it_leaves_when_it_is_empty",
    ),
    _row(
        "an-arena-has-one-daemon", "ckptd/arena/arena.py",
        "        if fd is None:\n", "        if fd is None and (fd := os.open(self.path, os.O_RDONLY)) < 0:\n",
        "daemon_death.py::test_eight_ranks_that_start_a_daemon_at_once_end_with_one",
    ),
    _row(
        "clients-start-the-next-daemon", f"{_CLIENT}_daemon/link.py",
        "self._restartable = self.settings.autostart and answer.client_started", "self._restartable = False",
        "daemon_death.py::test_a_daemon_that_a_client_started_comes_back_by_itself",
    ),
    _row(
        "a-lost-channel-is-opened-again", f"{_CLIENT}_daemon/link.py",
        "        if self._channel is not None and not self._channel.lost:\n            return",
        "        if self._channel is not None:\n            return",
        "daemon_death.py::test_saves_go_on_with_a_daemon_that_was_started_again",
    ),
)  # fmt: skip

ROWS = (*_DAEMONS,)  # fmt: skip
