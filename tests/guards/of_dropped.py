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
        "an-arena-has-records-that-the-store-lacks", "ckptd/cli/last_state.py",
        "read_journal(opened.files(key.job), segments)", "read_journal(opened.files(key.job))",
        f"{_LAST}::test_an_arena_has_records_that_the_store_lacks",
    ),
)  # fmt: skip
