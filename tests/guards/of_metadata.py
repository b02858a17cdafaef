"""Guards of what trainings say of their saves, of what is kept by it, and of paths."""

from tests.guards.guard import Edit, Guard

_UNIT = "tests/unit/"


def _row(name: str, file: str, text: str, removed: str, *tests: str) -> Guard:
    return Guard(name, (Edit(file, text, removed),), tuple(_UNIT + test for test in tests))


ROWS = (
    _row(
        "metadata-is-of-rank-0", "client/ckptd_client/_save/saving.py",
        "said = metadata if staging.group.rank == 0 else {}", "said = metadata if staging.group.rank else {}",
        "client/save/test_metadata.py::test_it_is_in_the_records_and_a_save_without_it_has_none",
    ),
    _row(
        "no-number-is-stored-as-none", "ckptd/shared/format/save_metadata.py",
        "return float.__float__(value) if math.isfinite(value) else None", "return float.__float__(value)",
        "shared/test_save_metadata.py::test_a_subclass_is_stored_as_what_it_is_and_no_finite_number_as_none",
    ),
    _row(
        "a-commit-copies-metadata", "ckptd/shared/format/manifest.py",
        "metadata=metadata_in(files[0].leaves),", "",
        "client/save/test_metadata.py::test_a_daemon_that_finds_the_slots_commits_it_without_the_rank",
    ),
    _row(
        "metadata-is-held-against-the-votes", "ckptd/checkpoint/verify.py",
        "        metadata_in(records[0].leaves), dropped_by", "        manifest.metadata, dropped_by",
        "checkpoint/test_verify.py::test_metadata_that_no_vote_has_is_damage",
    ),
    _row(
        "a-misspelt-key-removes-nothing", "ckptd/cli/prune.py",
        "        check_key(order.key,", "        print(order.key,",
        "cli/test_cli.py::test_prune_by_a_key_that_is_not_there_removes_nothing_of_any_job",
    ),
    _row(
        "a-mean-is-of-what-is-alike", "ckptd/checkpoint/export/average.py",
        "if other is None or (other.dtype, other.shape) != (tensor.dtype, tensor.shape):", "if other is None:",
        "checkpoint/test_export_average.py::test_what_is_not_alike_is_refused_and_can_be_left_out",
    ),
    _row(
        "a-file-has-no-relative-path", "ckptd/system/config.py",
        'if not _starts_somewhere(raw.strip()) and (in_file or resolved(".") == "/"):', "if False:",
        "system/test_config.py::test_a_relative_path_is_refused_in_a_file_and_in_the_root_directory",
    ),
)  # fmt: skip
