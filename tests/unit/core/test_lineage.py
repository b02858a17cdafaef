"""Which of several runs of one incarnation number is the job's."""

from ckptd.core.coordinator.lineage import Lineage
from ckptd.shared.base.ids import SaveId
from tests.runs import OTHER_RUN, RUN

OURS = SaveId(2, 3, 10, RUN)
THEIRS = SaveId(2, 3, 10, OTHER_RUN)


def both_held() -> Lineage:
    lineage = Lineage()
    lineage.held("a", [OURS])
    lineage.held("b", [THEIRS])
    return lineage


def test_saves_of_two_runs_of_one_number_are_never_equal_and_never_ordered() -> None:
    newer = SaveId(2, 4, 11, OTHER_RUN)
    for one, two in ((OURS, THEIRS), (OURS, newer)):
        assert one != two
        assert not any((one < two, two < one, one <= two, two <= one, one > two, two >= one))
    assert OURS < SaveId(3, 1, 0, OTHER_RUN) < SaveId(3, 2, 0, OTHER_RUN)


def test_the_only_run_that_was_seen_is_the_jobs() -> None:
    lineage = Lineage()
    lineage.held("a", [OURS])
    assert lineage.is_ours(OURS)
    assert not lineage.strangers


def test_a_run_that_none_contradicts_is_the_jobs_though_nothing_of_it_is_left() -> None:
    assert Lineage().is_ours(OURS)


def test_two_runs_of_one_number_are_in_dispute() -> None:
    lineage = both_held()
    assert lineage.is_disputed(OURS)
    assert lineage.is_disputed(THEIRS)
    assert lineage.rivals(2) == (RUN, OTHER_RUN)
    assert lineage.strangers == {(2, RUN), (2, OTHER_RUN)}


def test_what_is_committed_on_the_store_decides_before_the_record() -> None:
    lineage = both_held()
    lineage.on_store([], [(2, OTHER_RUN)])
    assert lineage.is_ours(THEIRS)
    lineage.on_store([OURS], [(2, OTHER_RUN)])
    assert lineage.is_ours(OURS)
    assert lineage.strangers == {(2, OTHER_RUN)}


def test_two_committed_runs_of_one_number_are_in_dispute_whatever_the_record_says() -> None:
    lineage = Lineage()
    lineage.on_store([OURS, THEIRS], [(2, RUN)])
    assert lineage.is_disputed(OURS)


def test_a_session_knows_its_own_number() -> None:
    lineage = both_held()
    lineage.on_store([THEIRS], [])
    lineage.begins(2, RUN)
    assert lineage.is_ours(OURS)


def test_the_user_decides_over_all() -> None:
    lineage = both_held()
    lineage.on_store([OURS], [(2, RUN)])
    lineage.name(OTHER_RUN)
    assert lineage.is_ours(THEIRS)
    assert not lineage.is_ours(OURS)


def test_a_node_that_no_longer_holds_a_run_takes_it_out_of_dispute() -> None:
    lineage = both_held()
    lineage.held("b", [])
    assert lineage.is_ours(OURS)
