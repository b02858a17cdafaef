"""Each row of the core's tables is reached by a test of the core: which one. A row that no test reaches fails here."""

import inspect
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from ckptd.core.coordinator.save_states import State
from tests.states import missed, reached
from tests.unit.core import test_attestations as attestations
from tests.unit.core import test_notices as notices
from tests.unit.core import test_rare_steps as rare
from tests.unit.core import test_restores as restores
from tests.unit.core import test_review as review
from tests.unit.core import test_saves as saves
from tests.unit.core import test_sessions as sessions
from tests.unit.core.nodes import test_admission as admission
from tests.unit.core.nodes import test_connect_costs as connect_costs
from tests.unit.core.nodes import test_drained_parity as drained_parity
from tests.unit.core.nodes import test_leaving as leaving
from tests.unit.core.nodes import test_numbers as numbers
from tests.unit.core.nodes import test_protection as protection
from tests.unit.core.nodes import test_rare_ends as ends
from tests.unit.core.nodes import test_readers as readers
from tests.unit.core.nodes import test_replicas as replicas
from tests.unit.core.nodes import test_restarts as restarts
from tests.unit.core.nodes import test_scrub as scrub
from tests.unit.core.nodes import test_two_runs as two_runs

FOUND = rare.test_what_is_found_committed_is_durable_whatever_was_said_of_it
VOTED = rare.test_votes_that_are_all_there_are_committed_whatever_was_said_of_the_save

ROWS: dict[Callable[..., Any], list[str]] = {
    protection.test_a_drain_ends_that_was_tried_again_on_a_node_that_has_lost_its_memory: [
        "save: - -> staging: begun",
        "save: staging -> queued: whole, due",
        "save: queued -> draining: store free",
        "save: draining -> committing: all nodes voted",
        "save: draining -> queued: failed, again later",
        "save: committing -> durable: renamed and synced",
        "protection: - -> encoding: ordered",
        "protection: encoding -> protected: all nodes sealed theirs",
        "protection: stuck -> -: released",
        "protection: protected -> -: a newer one protected",
        "admission: - -> gathering: a rank waits",
        "admission: gathering -> placed: every rank has a node",
        "admission: placed -> numbering: no other session lives, or takeover",
        "admission: numbering -> -: the number is there",
        "session: - -> open: a rank is in",
        "session: open -> orphaned: no rank is left",
        "session: orphaned -> open: a rank is in",
        "load: - -> collecting: a rank calls",
        "load: collecting -> fetching: segments lie elsewhere",
        "load: collecting -> reading: every rank has a route",
        "load: fetching -> collecting: all came, or cannot",
        "load: reading -> -: all ranks read it",
    ],
    saves.test_halves_that_were_adopted_end_when_the_store_knows_nothing_better: [
        "save: staging -> abandoned: a rank is missing"
    ],
    saves.test_late_ranks_of_a_save_that_is_over_get_their_slot_back: ["save: staging -> skipped: a rank skipped it"],
    rare.test_saves_of_every_end_are_dropped_and_counted: [
        "save: staging -> failed: steps differ",
        "save: kept -> -: forgotten",
        "save: failed -> -: forgotten",
        "save: superseded -> -: forgotten",
        "save: abandoned -> -: forgotten",
        "save: skipped -> -: forgotten",
    ],
    rare.test_no_save_of_a_number_in_dispute_waits_for_the_store: [
        "save: staging -> failed: number disputed",
        "save: kept -> failed: number disputed",
        "save: queued -> failed: number disputed",
        "save: superseded -> failed: number disputed",
    ],
    notices.test_saves_that_are_not_due_are_not_counted: ["save: staging -> kept: whole, not due"],
    attestations.test_a_daemon_that_restarted_finds_out_too: ["save: staging -> abandoned: replicas differ"],
    readers.test_only_nodes_that_are_sent_to_the_store_have_places: ["save: staging -> durable: found committed"],
    restarts.test_a_commit_that_fails_gives_up_nothing_of_which_a_silent_node_may_have_a_part: [
        "save: staging -> committing: all votes found"
    ],
    rare.test_what_was_taken_for_the_jobs_and_is_another_runs_is_in_no_table_any_more: [
        "save: staging -> -: forgotten",
        "save: queued -> -: forgotten",
    ],
    attestations.test_one_that_was_asked_for_is_drained_whatever_was_compared_and_its_record_says_so: [
        "save: kept -> queued: asked for"
    ],
    saves.test_the_newest_takes_the_turn_of_a_due_save_that_it_supersedes: ["save: kept -> queued: its turn"],
    partial(FOUND, rare.is_kept, State.KEPT): ["save: kept -> durable: found committed"],
    partial(VOTED, rare.is_kept, State.KEPT): ["save: kept -> committing: all votes found"],
    review.test_a_newer_forced_save_takes_the_place_of_one_that_waits: [
        "save: queued -> superseded: overtaken, or memory gone"
    ],
    saves.test_what_waited_for_its_drain_when_the_memory_was_given_up_has_an_end: [
        "save: queued -> failed: store silent, or memory gone"
    ],
    rare.test_what_waits_for_the_store_has_an_end_when_another_session_takes_the_job_over: [
        "save: queued -> failed: job taken over",
        "save: draining -> failed: job taken over",
    ],
    saves.test_a_drain_that_hangs_makes_one_save_an_hour_due: ["save: queued -> kept: its turn passed on"],
    saves.test_a_drain_that_was_finished_before_the_crash_is_durable: ["save: queued -> durable: found committed"],
    saves.test_complete_votes_are_committed_without_another_drain: ["save: queued -> committing: all votes found"],
    review.test_a_drain_that_finds_its_save_committed_confirms_it: ["save: draining -> committing: all votes found"],
    leaving.test_a_node_that_no_coordinator_speaks_to_gives_its_memory_back_after_a_while: [
        "save: draining -> failed: failed too long, or memory gone"
    ],
    rare.test_a_commit_that_fails_for_too_long_is_given_up: [
        "save: committing -> committing: once more",
        "save: committing -> failed: failed too long, or memory gone",
    ],
    saves.test_a_failed_commit_is_tried_alone_then_the_drain_again: ["save: committing -> queued: failed, again later"],
    two_runs.test_a_commit_after_a_takeover_ends_failed_and_nothing_more_is_drained: [
        "save: committing -> failed: job taken over"
    ],
    saves.test_records_of_the_past_are_bounded: ["save: durable -> -: forgotten"],
    saves.test_a_drain_that_never_succeeds_is_given_up_and_the_memory_kept: ["save: failed -> queued: asked for"],
    rare.test_the_newest_takes_the_turn_of_an_older_one_though_its_own_drain_was_given_up: [
        "save: failed -> queued: its turn",
        "save: abandoned -> queued: whole, due",
    ],
    partial(FOUND, rare.is_failed, State.FAILED): ["save: failed -> durable: found committed"],
    partial(VOTED, rare.is_failed, State.FAILED): ["save: failed -> committing: all votes found"],
    rare.test_what_was_superseded_for_its_memory_is_drained_when_it_is_back_and_asked_for: [
        "save: superseded -> queued: asked for"
    ],
    rare.test_the_newest_takes_the_turn_of_an_older_one_when_its_memory_is_back: [
        "save: superseded -> queued: its turn"
    ],
    partial(FOUND, rare.is_superseded, State.SUPERSEDED): ["save: superseded -> durable: found committed"],
    partial(VOTED, rare.is_superseded, State.SUPERSEDED): ["save: superseded -> committing: all votes found"],
    rare.test_an_abandoned_save_of_which_all_is_found_is_kept: ["save: abandoned -> kept: whole, not due"],
    rare.test_an_abandoned_save_whose_replicas_differ_stays_so_each_time_that_it_is_found: [
        "save: abandoned -> abandoned: replicas differ"
    ],
    partial(FOUND, rare.is_abandoned, State.ABANDONED): ["save: abandoned -> durable: found committed"],
    partial(VOTED, rare.is_abandoned, State.ABANDONED): ["save: abandoned -> committing: all votes found"],
    leaving.test_a_silent_node_of_the_session_delays_its_end_though_something_older_is_durable: [
        "protection: - -> protected: all nodes reported theirs"
    ],
    partial(restarts.test_a_coordinator_that_restarts_before_its_topology_was_kept_protects_again, "ab"): [
        "protection: encoding -> protected: all nodes reported theirs"
    ],
    drained_parity.test_an_encode_that_fails_keeps_only_its_own_node_waiting_no_longer: [
        "protection: encoding -> stuck: a node failed"
    ],
    restarts.test_a_node_of_the_session_before_is_known_to_a_coordinator_that_restarts_before_its_session_is_known: [
        "protection: encoding -> -: given up"
    ],
    ends.test_an_encode_that_runs_when_the_job_is_over_ends_with_it: ["protection: encoding -> -: released"],
    protection.test_an_encode_that_fails_is_tried_again: ["protection: stuck -> encoding: no failure left"],
    ends.test_parity_of_which_the_word_was_lost_is_found_though_a_node_had_failed: [
        "protection: stuck -> protected: all nodes reported theirs"
    ],
    restarts.test_members_that_do_not_reach_each_other_are_reported_at_once: [
        "protection: stuck -> stuck: a node failed"
    ],
    protection.test_an_encode_that_cannot_end_gives_way_to_a_newer_save: ["protection: stuck -> -: given up"],
    leaving.test_after_close_nothing_is_left_anywhere: ["protection: protected -> -: released"],
    admission.test_a_session_that_waits_for_another_and_ends_is_over: [
        "admission: gathering -> -: no rank waits any more",
        "admission: placed -> gathering: a rank ended",
    ],
    connect_costs.test_a_session_is_let_in_when_every_rank_has_a_node_and_its_missing_ranks_are_named: [
        "admission: gathering -> -: refused"
    ],
    sessions.test_a_rank_that_dies_before_admission_is_forgotten: ["admission: placed -> -: no rank waits any more"],
    connect_costs.test_daemons_that_cannot_reach_each_other_are_refused_on_all_nodes: [
        "admission: placed -> -: refused"
    ],
    sessions.test_a_number_that_comes_when_none_who_answers_waits_for_admission_opens_nothing: [
        "admission: numbering -> -: its nodes do not answer"
    ],
    sessions.test_a_store_that_cannot_be_used_refuses_all_ranks: ["admission: numbering -> -: refused"],
    two_runs.test_a_daemon_that_restarts_looks_only_at_the_store_that_its_memory_was_for: [
        "session: - -> orphaned: memory found at start"
    ],
    sessions.test_a_rank_that_dies_while_its_number_is_taken_is_forgotten: ["session: - -> orphaned: no rank is left"],
    numbers.test_a_number_of_the_store_is_taken_again_when_a_larger_one_has_become_known: [
        "session: open -> closing: all ranks closed",
        "session: closing -> -: memory given back",
    ],
    ends.test_a_session_that_comes_while_the_one_before_closes_has_the_memory: [
        "session: closing -> open: a rank is in"
    ],
    ends.test_memory_that_a_daemon_finds_after_the_death_of_its_ranks_is_orphaned_once: [
        "session: orphaned -> orphaned: memory found at start",
        "session: orphaned -> -: memory given back",
    ],
    ends.test_a_node_that_is_said_twice_not_to_answer_is_lost_once: ["session: orphaned -> orphaned: no rank is left"],
    ends.test_a_rank_that_ends_while_the_load_waits_for_the_store_ends_it: [
        "load: collecting -> draining: must be on the store first",
        "load: draining -> -: refused",
    ],
    restarts.test_the_end_of_a_load_that_found_nothing_is_reported_again: ["load: collecting -> -: nothing to restore"],
    partial(restarts.test_a_rank_that_missed_the_end_of_a_load_receives_it_from_a_restarted_coordinator, "b"): [
        "load: collecting -> -: had ended before"
    ],
    restores.test_a_load_after_a_rank_left_is_refused_at_once: ["load: collecting -> -: refused"],
    replicas.test_what_does_not_come_in_time_is_read_from_the_store: ["load: fetching -> collecting: too late"],
    ends.test_a_rank_that_ends_while_segments_are_on_their_way_ends_the_load: ["load: fetching -> -: refused"],
    restores.test_a_load_does_not_wait_for_a_drain_that_an_older_life_forbids: [
        "load: draining -> collecting: on the store, or never"
    ],
    restores.test_a_failing_drain_that_a_load_waits_for_is_given_up_for_an_older_checkpoint: [
        "load: draining -> collecting: too late"
    ],
    restores.test_a_rank_that_finds_all_images_too_few_has_found_damage: [
        "load: reading -> collecting: a rank could not read"
    ],
    restores.test_a_rank_that_never_reports_ends_the_load_and_is_named: ["load: reading -> -: refused"],
    scrub.test_a_damaged_segment_is_rebuilt_from_the_set: [
        "memory scrub: - -> reading: its turn",
        "memory scrub: reading -> rebuilding: damaged, the set can make it again",
        "memory scrub: rebuilding -> -: sound again",
    ],
    scrub.test_what_was_staged_is_read_an_hour_later_and_then_again: ["memory scrub: reading -> -: sound"],
    scrub.test_a_block_that_the_executor_calls_gone_is_no_finding: ["memory scrub: reading -> -: released meanwhile"],
    scrub.test_a_job_without_a_set_has_the_store_alone: [
        "memory scrub: reading -> copying: damaged, the store may have it",
        "memory scrub: copying -> -: damaged, nothing has it",
    ],
    scrub.test_a_damaged_tail_that_nothing_has_is_said_until_its_save_is_released: [
        "memory scrub: reading -> -: damaged, nothing has it"
    ],
    scrub.test_what_cannot_be_rebuilt_comes_from_the_store_block_by_block: [
        "memory scrub: rebuilding -> copying: damaged, the store may have it",
        "memory scrub: copying -> -: sound again",
    ],
    partial(scrub.test_a_save_that_is_released_meanwhile_is_no_finding, "rebuilding"): [
        "memory scrub: rebuilding -> -: released meanwhile"
    ],
    partial(scrub.test_a_save_that_is_released_meanwhile_is_no_finding, "copying"): [
        "memory scrub: copying -> -: released meanwhile"
    ],
    partial(scrub.test_damaged_parity_is_made_again_from_the_segments, fails=True): [
        "memory scrub: rebuilding -> -: damaged, nothing has it"
    ],
    scrub.test_the_coordinator_reads_what_was_committed_a_day_ago_piece_by_piece: [
        "store scrub: - -> reading: its turn",
        "store scrub: reading -> -: sound",
    ],
    partial(scrub.test_a_store_that_is_silent_or_a_checkpoint_that_is_removed_is_no_finding, {"problem": "EIO"}): [
        "store scrub: reading -> -: the store did not answer"
    ],
    partial(scrub.test_a_store_that_is_silent_or_a_checkpoint_that_is_removed_is_no_finding, {"gone": True}): [
        "store scrub: reading -> -: removed meanwhile"
    ],
    scrub.test_what_is_no_image_is_said_and_left: ["store scrub: reading -> -: damaged, nothing can make it again"],
    scrub.test_damaged_images_are_written_again_where_they_lie_in_memory: [
        "store scrub: reading -> mending: damaged images",
        "store scrub: mending -> -: all nodes answered",
    ],
    scrub.test_a_node_that_does_not_answer_is_waited_for_an_hour: [
        "store scrub: mending -> -: some node did not answer"
    ],
}


def test_each_row_has_a_test():
    assert {row for rows in ROWS.values() for row in rows} == set(missed(Counter()))


@pytest.mark.parametrize(("test", "rows"), ROWS.items())
def test_they_are_taken(test, rows):
    with reached(Counter()) as taken:
        test(*([taken] if "rows" in inspect.signature(test).parameters else []))
    assert [row for row in rows if not taken[row]] == []
