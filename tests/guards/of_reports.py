"""Guards of what a node reports of its ranks: in which order, in one report for many, and to whom."""

from tests.guards.guard import Edit, Guard

_DELIVERY = "tests/unit/core/nodes/test_delivery.py::"


def _row(name: str, file: str, text: str, removed: str, *tests: str) -> Guard:
    return Guard(name, (Edit(f"ckptd/core/node/{file}", text, removed),), tuple(f"{_DELIVERY}{test}" for test in tests))


ROWS = (
    _row(
        "ranks-that-end-together-are-one-report", "delivery.py",
        "if at_once or not self._ranks.of(session)]", "if True]",
        "test_ranks_that_end_together_are_one_report",
    ),
    _row(
        "a-rank-that-ends-alone-is-reported", "delivery.py",
        "self._ending.is_over(now, waits=bool(self._gone))", "False",
        "test_a_rank_that_ends_alone_is_reported_soon",
    ),
    _row(
        "what-a-rank-staged-is-reported-before-its-end", "delivery.py",
        "return [*map(report, first), *others,", "return [*others, *map(report, first),",
        "test_that_a_rank_staged_is_known_before_it_is_known_to_have_ended",
    ),
    _row(
        "all-that-know-a-rank-learn-of-its-end", "membership.py",
        "return [self.report(event, node) for node in self._told]", "return [self.report(event, self.coordinator)]",
        "test_all_nodes_that_know_a_rank_learn_that_it_ended",
    ),
)  # fmt: skip
