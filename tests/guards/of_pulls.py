"""Guards of loads by other ranks: what is pulled of the memory of nodes, and the index of a checkpoint's records."""

from tests.guards.guard import NODES, Edit, Guard

_PULLED_LOSS = f"{NODES}test_pulled_loss.py::"
_PULLS = "tests/unit/parity/test_pulls.py::"
_NEEDED = "tests/unit/client/load/test_needed.py::"
_FLIPS = "tests/faults/test_bit_flips.py::"


def _row(name: str, file: str, text: str, removed: str, *tests: str) -> Guard:
    return Guard(name, (Edit(file, text, removed),), tests)


ROWS = (
    _row(
        "what-a-dead-daemon-pulled-is-removed", "ckptd/arena/arena.py",
        "if name.endswith(arena_paths.PARTIAL_SUFFIX) and path not in self._used:", "if False:",
        f"{_PULLED_LOSS}test_a_daemon_dies_while_ranks_pull[d-back-none]",
        f"{_PULLS}test_what_an_earlier_daemon_pulled_is_removed_at_start",
    ),
    _row(
        "what-does-not-come-is-made-good", "ckptd/core/coordinator/load_round.py",
        "            self._lost(save, lacked)\n", "            pass\n",
        f"{_PULLED_LOSS}test_a_flipped_bit_on_the_wire_is_in_no_state",
    ),
    _row(
        "pulled-bytes-are-those-that-were-sent", "ckptd/shared/bulk/client.py",
        "if not marks.is_right(found, running):", "if False:",
        f"{_PULLED_LOSS}test_a_flipped_bit_on_the_wire_is_in_no_state",
    ),
    _row(
        "a-holder-checks-what-is-pulled", "ckptd/parity/pulls.py",
        "min(_FRAME_NBYTES, offset + nbytes - start), True)", "min(_FRAME_NBYTES, offset + nbytes - start), False)",
        f"{_PULLS}test_a_damaged_block_is_named_and_the_rest_comes",
    ),
    _row(
        "only-bytes-of-the-image-are-pulled", "ckptd/parity/pulls.py",
        "        if stop > seal.image_nbytes:\n", "        if False:\n",
        f"{_PULLS}test_bytes_beyond_the_image_are_refused",
    ),
    _row(
        "what-is-pulled-is-given-back", "ckptd/arena/partial_segments.py",
        "            self._arena.unlink(self._job, partial.name)\n", "            del partial\n",
        f"{_PULLS}test_memory_counts_by_the_page_and_is_given_back",
    ),
    _row(
        "an-index-is-the-one-that-is-pinned", "ckptd/shared/format/stored_records.py",
        "if (len(raw), files.integrity.digest(raw, Purpose.INDEX)) != (index.nbytes, index.digest):", "if not raw:",
        f"{_NEEDED}test_an_index_that_is_damaged_is_refused_by_name_and_all_votes_say_the_same",
    ),
    _row(
        "a-damaged-index-costs-no-load", "client/ckptd_client/_load/sought.py",
        '    except (DamagedError, OSError) as error:\n        log.warning("ckptd: warning: %s; all votes',
        '    except FileExistsError as error:\n        log.warning("ckptd: warning: %s; all votes',
        f"{NODES}test_damage.py::test_in_the_index_of_a_checkpoint_it_costs_no_load",
    ),
    _row(
        "verify-compares-the-index-with-the-records", "ckptd/checkpoint/verify_index.py",
        "found != index_of(opened.votes):", "False:",
        f"{_NEEDED}test_verify_reports_an_index_that_says_something_else_than_the_records",
    ),
    _row(
        "verify-reads-the-index", "ckptd/checkpoint/verify.py",
        "        if wrong := index_problem(opened):\n", "        if wrong := '':\n",
        f"{_FLIPS}test_no_bit_of_a_checkpoint_is_missed_by_verify",
        f"{NODES}test_damage.py::test_in_the_index_of_a_checkpoint_it_costs_no_load",
    ),
)  # fmt: skip
