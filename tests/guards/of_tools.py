"""Guards of the demo, of campaigns and of the bench of real nodes: they judge, so their judgement has guards too."""

from tests.guards.guard import FAULTS
from tests.guards.guard import fault_guard as _row
from tests.guards.guard import nodes_guard as _nodes_row

_COORDINATOR = "ckptd/core/coordinator/"
_CLIENT = "client/ckptd_client/"

_DEMO = (
    _row(
        "the-demo-restores-from-memory", f"{_COORDINATOR}locations.py",
        "if here and (save, Tier.ARENA, rank) not in damaged:", "if False:",
        "demo.py::test_the_short_demo_proves_what_it_says",
    ),
    _row(
        "the-last-attempt-counts", f"{_CLIENT}demo/report.py",
        "joined[step] = (loss, name)", "joined.setdefault(step, (loss, name))",
        "demo.py::test_equal_curves_are_joined",
    ),
    _row(
        "each-loss-is-compared", f"{_CLIENT}demo/report.py",
        "if loss != expected[step]:", "if False:",
        "demo.py::test_one_bit_of_one_loss_is_noticed_even_if_the_step_was_run_again",
    ),
    _row(
        "each-step-has-a-loss", f"{_CLIENT}demo/report.py",
        "if sorted(joined) != list(range(steps)):", "if False:",
        "demo.py::test_a_missing_step_is_noticed",
    ),
    _row(
        "all-ranks-have-one-digest", f"{_CLIENT}demo/report.py",
        "if len(digests) != 1:", "if not digests:",
        "demo.py::test_other_weights_are_noticed",
    ),
    _row(
        "different-losses-show-their-bits", f"{_CLIENT}demo/report.py",
        "exact = loss != expected[step]", "exact = False",
        "demo.py::test_the_curves_show_their_bits_only_where_they_differ",
    ),
    _row(
        "what-was-not-measured-has-no-row", f"{_CLIENT}demo/report.py",
        "        if slowed:\n", "        if True:\n",
        "demo.py::test_what_was_not_measured_has_no_row",
    ),
    _row(
        "what-is-told-is-compared", f"{_CLIENT}demo/told.py",
        "    if told != ours:\n", "    if False:\n",
        "demo.py::test_a_history_that_is_true",
    ),
    _row(
        "a-milestone-that-was-reported-is-in-the-history", f"{_CLIENT}demo/told.py",
        "if waited_for is None and step in _reached(records, milestone):", "if False:",
        "demo.py::test_a_history_that_is_not_is_noticed",
    ),
    _row(
        "a-status-counts-as-a-report", f"{_CLIENT}demo/promises.py",
        "    steps += [] if reported is None else [reported]\n", "",
        "demo.py::test_a_promise_that_was_kept",
    ),
    _row(
        "an-older-step-breaks-a-promise", f"{_CLIENT}demo/promises.py",
        "    if step < promised:\n", "    if False:\n",
        "demo.py::test_a_broken_promise_is_noticed",
    ),
    _row(
        "every-rank-restores", f"{_CLIENT}demo/promises.py",
        "    if missing:\n", "    if False:\n",
        "demo.py::test_a_training_that_began_from_nothing_is_noticed",
    ),
    _row(
        "a-journal-has-whole-lines", f"{_CLIENT}demo/journal.py",
        'whole = data[: data.rfind(b"\\n") + 1]', "whole = data",
        "demo.py::test_a_journal_is_read_while_it_is_written",
    ),
)  # fmt: skip

_CAMPAIGNS = (
    _row(
        "a-seed-is-a-seed", f"{FAULTS}history_plan.py",
        'random.Random(f"history-{seed}")', "random.Random()",
        "campaign_parts.py::test_a_seed_has_one_history",
    ),
    _row(
        "nodes-come-back-before-a-run", f"{FAULTS}history_plan.py",
        "        events += _bring_back(rng, world, homes)\n", "",
        "campaign_parts.py::test_histories_start_on_nodes_that_are_up",
    ),
    _row(
        "a-store-comes-back", f"{FAULTS}history_plan.py",
        "world.mounted = not world.mounted", "world.mounted = False",
        "campaign_parts.py::test_a_store_is_unmounted_before_it_is_back",
    ),
    _row(
        "a-user-ends-ranks-first", f"{FAULTS}history_plan.py",
        '            events += [Event("end")] if world.living else []\n', "",
        "campaign_parts.py::test_a_user_starts_over_when_no_rank_lives_and_only_an_older_run_lingers",
    ),
    _row(
        "old-runs-linger", f"{FAULTS}history_plan.py",
        "if world.living[:-1] and rng.random() < 0.7:", "if False:",
        "campaign_parts.py::test_every_event_is_in_some_history",
    ),
    _row(
        "bytes-of-two-runs-are-a-finding", f"{FAULTS}verdicts.py",
        "    if len(seen) > 1:\n", "    if False:\n",
        "campaign_parts.py::test_what_ranks_say_has_a_verdict",
    ),
    _row(
        "an-older-checkpoint-is-a-finding", f"{FAULTS}verdicts.py",
        "    if found < newest:\n", "    if False:\n",
        "campaign_parts.py::test_an_older_checkpoint_than_was_promised_is_stale_and_none_is_a_loss",
    ),
    _row(
        "disturbances-are-counted", f"{FAULTS}kill_plan.py",
        "        left -= number\n", "        left -= 1\n",
        "campaign_parts.py::test_a_seed_has_so_many_disturbances_of_every_kind",
    ),
    _row(
        "a-lost-node-ends-promises", f"{FAULTS}promises.py",
        "if held.spare < 0:", "if held.spare < -1:",
        "campaign_parts.py::test_a_lost_node_takes_what_is_staged_and_another_what_is_protected",
    ),
    _row(
        "only-memory-is-staged-again", f"{FAULTS}promises.py",
        "        if set(tiers) <= _IN_MEMORY:\n", "        if True:\n",
        "campaign_parts.py::test_what_a_load_gives_from_memory_is_staged_again_and_a_newer_run_outranks_a_higher_step",
    ),
    _row(
        "a-line-that-was-cut-short-is-none", f"{FAULTS}event_logs.py",
        '                if line.endswith("\\n"):\n', "                if True:\n",
        "campaign_parts.py::test_a_diary_that_was_cut_short_is_read_up_to_there",
    ),
    _row(
        "what-takes-too-long-ends", f"{FAULTS}campaigns.py",
        'raise OverdueError(f"took', 'str(f"took',
        "campaign_parts.py::test_what_takes_too_long_is_ended",
    ),
    _row(
        "a-record-of-what-the-store-lacks-is-a-finding", f"{FAULTS}journal_claims.py",
        "place not in self._stored and place > self._kept_from:", "False:",
        "campaign_parts.py::test_a_record_that_is_not_true_is_noticed",
    ),
    _row(
        "what-retention-has-removed-was-there", f"{FAULTS}journal_claims.py",
        "place not in self._stored and place > self._kept_from:", "place not in self._stored:",
        "campaign_parts.py::test_a_journal_that_is_true_has_no_lies",
    ),
    _row(
        "a-record-belongs-to-a-run", f"{FAULTS}journal_claims.py",
        '                yield f"of no run: {entry}"\n', "                continue\n",
        "campaign_parts.py::test_a_record_before_any_run_is_noticed",
    ),
)  # fmt: skip

_REAL_NODES = (
    _nodes_row(
        "real-nodes-load-from-memory", f"{_COORDINATOR}locations.py",
        "if here and (save, Tier.ARENA, rank) not in damaged:", "if False:",
        "real_nodes.py::test_two_of_twelve_real_nodes_are_lost_and_all_load_from_memory_and_then_fewer_ranks",
    ),
    _nodes_row(
        "real-nodes-compare-bits", "bench/nodes/job.py",
        " or not rank.is_intact:", ":",
        "real_nodes.py::test_a_rank_that_reads_another_bit_is_found",
    ),
    _nodes_row(
        "real-nodes-end", "bench/nodes/job.py",
        "stack.callback(daemon.kill)", "_ = daemon.kill",
        "real_nodes.py::test_nothing_is_left_of_what_is_interrupted",
    ),
    _nodes_row(
        "real-ranks-give-slots-back", "bench/large/rank.py",
        "        self._await(m.SlotsComing)", "        #",
        "real_nodes.py::test_a_rank_stages_in_no_slot_that_it_has_given_back",
    ),
)  # fmt: skip

ROWS = (*_DEMO, *_CAMPAIGNS, *_REAL_NODES)  # fmt: skip
