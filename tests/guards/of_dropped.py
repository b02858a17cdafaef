"""Guards of what a checkpoint loses by ``ckptd prune --drop``, and of the last state of a job."""

from tests.guards.guard import Edit, Guard

_REDUCE = "tests/unit/checkpoint/test_reduce.py"
_MEANWHILE = "tests/unit/checkpoint/test_reduce_meanwhile.py"
_LAST = "tests/unit/cli/test_last_state.py"


def _row(name: str, file: str, text: str, removed: str, test: str) -> Guard:
    return Guard(name, (Edit(file, text, removed),), (test,))


ROWS = (
    _row(
        "pinned-ones-stay-whole", "ckptd/cli/prune.py",
        "if save.dirname not in pins]", "]",
        f"{_REDUCE}::test_the_newest_and_pinned_ones_stay_whole",
    ),
    _row(
        "what-was-put-aside-gets-its-name-back", "ckptd/store/posix/removal.py",
        "        fs.rename(aside, final)\n", "        pass\n",
        f"{_REDUCE}::test_a_crash_at_any_step_leaves_the_whole_or_the_rest",
    ),
    _row(
        "a-trainers-links-keep-a-checkpoint-whole", "ckptd/checkpoint/reduce.py",
        "if UNPUBLISHED in names or LINKED in names:", "if False:",
        f"{_REDUCE}::test_what_a_trainer_looks_for_stays_whole_and_says_so",
    ).beside("ckptd/store/posix/again.py", "elif UNPUBLISHED in names or LINKED in names:", "elif False:"),
    _row(
        "a-drop-writes-where-no-scan-looks", "ckptd/store/posix/again.py",
        'Place(key, save, f"{LESS_PREFIX}{save.dirname}-{secrets.token_hex(6)}")', "Place(key, save)",
        f"{_MEANWHILE}::test_a_daemons_look_sees_nothing_unfinished_while_a_drop_runs",
    ),
    _row(
        "what-is-committed-again-is-no-leftover", "ckptd/store/posix/store.py",
        "key, hidden = self._key(job), removal.whole_name(save)", 'key, hidden = self._key(job), ""',
        "tests/unit/checkpoint/test_finishing.py::test_a_daemons_look_removes_nothing_of_what_is_committed_again",
    ),
    _row(
        "a-tied-tensor-keeps-its-bytes", "ckptd/checkpoint/reduced_image.py",
        "if name in kept and holder not in kept:", "if False:",
        f"{_REDUCE}::test_a_tensor_that_is_tied_to_a_dropped_one_keeps_the_checkpoint_whole",
    ),
    _row(
        "a-load-names-what-was-dropped", "client/ckptd_client/_load/dropped.py",
        "        if not asked:\n", "        if True:\n",
        f"{_REDUCE}::test_the_error_of_a_load_names_what_was_dropped",
    ),
    _row(
        "a-mend-stays-in-the-directory-that-it-opened", "ckptd/system/beneath.py",
        '_open_named(named, strict=strict) if held is None else os.open(".", _STEP, dir_fd=held)',
        "_open_named(named, strict=strict)",
        f"{_MEANWHILE}::test_a_mend_under_way_writes_nothing_into_what_takes_the_place",
    ),
    _row(
        "what-a-drop-wrote-is-read-back", "ckptd/checkpoint/reduce.py",
        "            self._read_back(again)\n", "",
        f"{_MEANWHILE}::test_what_was_written_is_read_back_before_the_whole_one_goes",
    ),
    _row(
        "a-drop-looks-for-room", "ckptd/checkpoint/reduce.py",
        "if need > free:", "if False:",
        f"{_MEANWHILE}::test_a_drop_without_room_writes_nothing",
    ),
    _row(
        "a-pin-right-before-the-drop-counts", "ckptd/store/posix/again.py",
        "            self._look_at(aside)  # now nobody finds it, to pin it or to link to it\n", "",
        f"{_MEANWHILE}::test_a_pin_right_before_the_rename_holds",
    ),
    _row(
        "a-pin-is-of-the-checkpoint-that-was-there", "ckptd/store/pins.py",
        "if new and after != before:", "if False:",
        f"{_MEANWHILE}::test_a_pin_that_comes_between_says_that_the_checkpoint_is_another_one",
    ),
    _row(
        "of-two-drops-the-later-gives-up", "ckptd/store/posix/again.py",
        "if found.manifest != self._manifest:", "if False:",
        f"{_MEANWHILE}::test_of_two_drops_the_later_one_takes_nothing_back",
    ),
    _row(
        "an-interrupted-drop-gives-the-name-back", "ckptd/store/posix/again.py",
        "except BaseException:", "except OSError:",
        f"{_MEANWHILE}::test_what_ends_a_drop_between_its_renames_leaves_the_name",
    ),
    _row(
        "an-arena-has-records-that-the-store-lacks", "ckptd/cli/last_state.py",
        "read_journal(opened.files(key.job), journals.in_arena(arena, key))", "read_journal(opened.files(key.job))",
        f"{_LAST}::test_an_arena_has_records_that_the_store_lacks",
    ),
)  # fmt: skip
