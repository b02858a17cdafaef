"""Guards of replicas in a part of the job: whose slices make a whole, who gets them, whose tensor a name means."""

from tests.guards.guard import Edit, Guard

_CLIENT = "client/ckptd_client/"
_TWINS = "tests/unit/client/load/test_twins.py::"
_STAGES = "tests/interop/test_stages.py::"


def _row(name: str, file: str, text: str, removed: str, *tests: str) -> Guard:
    return Guard(name, (Edit(file, text, removed),), tests)


ROWS = (
    _row(
        "only-the-members-of-a-set-share-it", "ckptd/shared/format/replica_attestations.py",
        "if tuple(said_by) == ranks_in(members):", "if members:",
        "tests/unit/core/test_attestations.py::test_all_members_of_a_set_and_no_other_rank_must_share",
        "tests/unit/core/nodes/test_replicas.py::test_a_rank_that_is_in_no_set_of_its_words_ends_the_save",
    ),
    _row(
        "a-node-gets-its-ranks-sets-alone", "ckptd/core/node/gather.py",
        "if rank < world_size)", "if rank < world_size) | {*range(world_size)}",
        "tests/unit/core/nodes/test_replicas.py::test_a_node_gets_the_segments_of_its_ranks_own_sets_alone",
    ),
    _row(
        "a-tensor-of-a-part-of-the-job-is-its-holders", "ckptd/shared/format/tensor_holders.py",
        "layout.holders.get(layout.aliases.get(name, name), NOBODY) if layout.holders else NOBODY", "NOBODY",
        f"{_TWINS}test_each_rank_gets_the_tensors_of_its_stage",
        f"{_TWINS}test_readers_that_know_of_no_stage_get_one_tensor_of_each_name",
        f"{_TWINS}test_an_export_has_the_tensor_of_the_lowest_ranks",
    ),
    _row(
        "parts-of-a-job-are-compared-before-one-counts", f"{_CLIENT}_load/fit.py",
        "            self.twins.compare(images)", "            pass",
        f"{_TWINS}test_ranks_of_another_number_are_not_given_one_of_several",
    ),
    _row(
        "a-tied-name-is-held-as-its-owner", f"{_CLIENT}_load/twins.py",
        "found[name].mine = members", "pass",
        f"{_TWINS}test_a_tied_name_is_its_stages_also_on_a_rank_that_saves_nothing_of_it",
    ),
    _row(
        "a-name-of-several-parts-is-sought-in-all-records", f"{_CLIENT}_load/needed.py",
        "if several := sought.held_by_several():", "if several := []:",
        "tests/unit/client/load/test_needed.py::test_a_name_that_two_parts_of_a_job_hold_is_sought_in_all_records",
    ),
    _row(
        "few-layouts-decide-on-no-name-of-several-parts", f"{_CLIENT}_load/fit.py",
        "        if not saves.whole:\n", "        if False:\n",
        "tests/interop/test_pulled.py::test_a_name_that_two_parts_of_a_job_hold_is_sought_in_all_layouts",
    ),
    _row(
        "what-an-index-cannot-say-all-records-say", f"{_CLIENT}_load/stored_fit.py",
        "with contextlib.suppress(OtherRanksNeededError):", "with contextlib.suppress(FileExistsError):",
        "tests/unit/client/load/test_needed.py::test_a_name_that_two_parts_of_a_job_hold_is_sought_in_all_records",
    ),
    _row(
        "a-stage-shares-what-its-mesh-holds", f"{_CLIENT}_state/replicas.py",
        "ranks, held = meshes.of(value) if known else ((), ())", "ranks, held = ((), ())",
        f"{_STAGES}test_each_stage_saves_slices_and_gets_its_own_back_from_memory_and_from_the_store",
    ),
)  # fmt: skip
