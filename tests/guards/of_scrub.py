"""Guards of scrubs: what is found, from where it is made good, what is no finding, and the rate."""

from tests.guards.guard import Edit, Guard, nodes_guard
from tests.guards.guard import fault_guard as _row

_MEMORY, _STORE = "ckptd/core/scrub/memory.py", "ckptd/core/scrub/store.py"
_UNIT = "tests/unit/parity/test_scrub.py::"
_CORE = "tests/unit/core/nodes/test_scrub.py::"
_LANES = "tests/unit/store/test_lanes.py::"
_REQUESTS = "tests/unit/checkpoint/test_scrub_requests.py::"

ROWS = (
    _row(
        "scrub-takes-blocks-from-the-store", _MEMORY,
        "if item.rank is None or place.block == TAIL:", "if item:",
        "scrub.py::test_a_bit_in_idle_memory_is_made_good_from_the_store",
    ),
    _row(
        "scrub-remembers-what-is-damaged", "ckptd/core/scrub/findings.py",
        "elif spot in self.damaged or len(self.damaged) < _MOST:", "elif spot in self.damaged:",
        "scrub.py::test_what_nothing_has_stands_first_in_status_until_it_is_released",
    ),
    _row(
        "scrub-writes-images-again-from-memory", "ckptd/checkpoint/requests.py",
        "    if request.slots:\n", "    if not request.slots:\n",
        "scrub.py::test_bits_on_the_store_are_made_good_from_memory",
    ),
    _row(
        "scrub-says-what-is-lost", _STORE,
        "if rank in event.memory or rank in event.parity:", "if harm:",
        "scrub.py::test_a_bit_on_the_store_that_no_memory_has_is_reported",
    ),
    _row(
        "scrub-keeps-its-rate", "ckptd/core/coordinator/scrub_order.py",
        "self.free_at = max(self.free_at, now) + nbytes / max(1, self.bytes_per_s)", "self.free_at = now",
        "scrub.py::test_the_rate_of_a_daemon_is_kept",
    ),
    nodes_guard(
        "scrub-rebuilds-from-the-set", _MEMORY,
        "chunk = self._chunk_for(slot) if slot is not None else None", "chunk = None",
        "scrub.py::test_a_segment_and_parity_are_made_again_from_the_set",
    ),
    Guard(
        "scrub-compares-seals-after-it-has-read",
        (Edit("ckptd/parity/scrub.py", "if damage and bytes(view[-SEALS_NBYTES:]) != sealed:", "if damage is None:"),),
        (
            f"{_UNIT}test_a_slot_that_goes_from_save_to_save_is_never_damaged",
            f"{_UNIT}test_a_seal_that_came_back_is_another_one",
        ),
    ),
    Guard(
        "scrub-waits-for-saves-and-drains",
        (Edit(_MEMORY, "        if not self._is_quiet():\n", "        if self._job is None:\n"),),
        (f"{_CORE}test_it_waits_for_saves_drains_and_encodes",),
    ),
    Guard(
        "scrub-has-a-thread-of-its-own",
        (Edit("ckptd/store/worker.py", "self._pools[lane_of(request)].submit", "self._pools[MAIN].submit"),),
        (f"{_LANES}test_scrubs_that_hang_take_no_thread_of_a_drain",),
    ),
    Guard(
        "word-of-a-scrub-is-none-of-a-drain",
        (Edit("ckptd/store/workers.py", "if one is None or one.lane == MAIN:", "if state is not None:"),),
        (f"{_LANES}test_word_of_a_mend_does_not_hide_a_drain_that_hangs",),
    ),
    Guard(
        "what-hangs-in-a-lane-holds-it",
        (
            Edit(
                "ckptd/store/workers.py", "        if one.lane == MAIN:\n            state.pending.pop",
                "        if one.request:\n            state.pending.pop",
            ),
        ),
        (f"{_LANES}test_the_worker_is_replaced_after_a_late_one_and_not_under_a_drain",),
    ),
    Guard(
        "a-mend-counts-what-it-reads-and-writes",
        (Edit("ckptd/checkpoint/repair/files.py", "        self._progress(self.moved)\n", ""),),
        (
            f"{_REQUESTS}test_there_is_word_of_each_block_that_is_read_or_written",
            f"{_REQUESTS}test_the_rate_is_kept_when_images_are_written_again",
        ),
    ),
    Guard(
        "a-mend-answers-its-own-order",
        (Edit(_STORE, "event.number != self._order", "event.save != self._at[0]"),),
        (f"{_CORE}test_the_answer_to_an_earlier_order_is_not_taken_for_another_ones",),
    ),
    Guard(
        "scrub-compares-committed-after-it-has-read",
        (Edit("ckptd/checkpoint/scrub.py", "if not now or now != before:", "if not now:"),),
        ("tests/unit/checkpoint/test_scrub.py::test_a_checkpoint_in_whose_place_another_one_is_put_is_no_finding",),
    ),
)  # fmt: skip
