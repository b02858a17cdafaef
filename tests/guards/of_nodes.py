"""Guards of promises between nodes: each fault test of tests/faults/nodes needs one."""

from tests.guards.guard import FAULTS
from tests.guards.guard import nodes_guard as _row

_COORDINATOR = "ckptd/core/coordinator/"
_NODE = "ckptd/core/node/"

_DAMAGE = (
    _row(
        "a-block-read-from-memory-is-checked", "client/ckptd_client/_load/reader.py",
        "source.check(index, found.value())", "pass",
        "damage.py::test_in_a_slot_that_is_read_back_it_is_repaired_from_parity[xor]",
    ),
    _row(
        "a-block-is-checked-before-it-is-sent", "ckptd/shared/bulk/server.py",
        "served.check(offset, nbytes)", "pass",
        "damage.py::test_in_a_slot_while_it_is_encoded_it_never_reaches_parity",
    ),
    _row(
        "a-rebuilt-block-is-checked", "ckptd/parity/rebuild.py",
        "            if not whole:\n", "            if False:\n",
        "damage.py::test_in_what_a_rebuild_needs[slot-xor]",
        "links.py::test_a_flipped_bit_on_the_wire_is_never_in_a_rebuilt_shard",
    ),
    _row(
        "a-frame-of-the-wire-is-checked", "ckptd/shared/bulk/client.py",
        "if not marks.is_right(found, running):", "if False:",
        "links.py::test_a_flipped_bit_on_the_wire_is_never_in_the_parity",
    ),
    _row(
        "verify-compares-digests", "ckptd/checkpoint/verify_image.py",
        'report.problem(inside[0].path, f"digest', '_ = (inside[0].path, f"digest',
        "integrity.py::test_staged_protected_durable_and_back_by_each_tier",
    ),
    _row(
        "ranks-compare-their-keys", "client/ckptd_client/_daemon/rendezvous.py",
        "if own.integrity != first.integrity:", "if False:",
        "integrity.py::test_ranks_whose_nodes_have_other_keys_find_out_at_connect",
    ),
)  # fmt: skip

_FILES = (
    _row(
        "every-node-gets-all-files-from-memory", f"{_COORDINATOR}restores.py",
        "if save in r.unwhole or record is None:", "if True:",
        "files.py::test_files_of_a_lost_node_come_from_parity",
    ),
    _row(
        "each-node-publishes-its-own-part", "ckptd/daemon/publishing.py",
        "if self._publications.is_due(job, save) and", "if False and",
        "files.py::test_files_of_all_nodes_are_published[False]",
    ),
)  # fmt: skip

_LINKS = (
    _row(
        "an-encode-that-failed-is-tried-again", f"{_COORDINATOR}parity_scheduler.py",
        "self._retry_at = now + pause", "self._retry_at = now + 600 * pause",
        "links.py::test_connections_that_are_cut_cost_time_only",
    ),
    _row(
        "a-rank-repeats-which-saves-it-missed", "client/ckptd_client/_daemon/outbox.py",
        "for save, reason in list(self._missed.items()):", "for save, reason in []:",
        "links.py::test_a_daemon_that_stays_away_for_a_while_costs_its_rank_s_saves_only[c]",
    ),
    _row(
        "staged-only-with-every-rank", f"{_COORDINATOR}saves.py",
        "complete = SAVE.takes(record.state, On.WHOLE) and record.in_memory",
        "complete = SAVE.takes(record.state, On.WHOLE)",
        "links.py::test_a_node_that_is_cut_off_degrades_its_set_until_it_is_back",
    ),
    _row(
        "status-names-nodes-that-are-silent", f"{_COORDINATOR}parity_scheduler.py",
        "unreachable=set(self.topology.nodes) - self._facts.links.up,", "unreachable=set(),",
        "links.py::test_a_stopped_peer_degrades_its_set_until_it_goes_on",
    ),
    _row(
        "members-repeat-their-columns", f"{_NODE}parity.py",
        "return self._tell(self.ordered, own, (node,))", "return []",
        "links.py::test_a_daemon_restarted_during_the_encode_goes_on_with_it[c]",
    ),
    _row(
        "a-token-opens-one-connection", "ckptd/shared/bulk/server.py",
        "if not counters.take(counter):", "if False:",
        "links.py::test_what_is_said_again_changes_nothing",
    ),
    _row(
        "an-unknown-key-is-kept-out", "ckptd/peers/zap.py",
        "if known(stranger.key):", "if True:",
        "links.py::test_a_daemon_with_another_key_is_refused_and_reported",
    ),
)  # fmt: skip

_LOSS = (
    _row(
        "every-crash-point-is-listed", "ckptd/system/failpoints.py",
        '    "encode.after-seal",\n', "",
        "loss.py::test_every_point_is_in_the_long_list",
    ),
    _row(
        "older-parity-stays-until-newer-is-protected", f"{_NODE}parity.py",
        "{key, *(held for held in self.chunks if held >= newest)}", "{key, newest} - {newest}",
        "loss.py::test_a_node_lost_at_this_point_costs_nothing_that_was_promised[encode.half-pulled-c]",
    ),
    _row(
        "a-closed-job-has-lost-segments-rebuilt", f"{_COORDINATOR}leave.py",
        "if facts.active is None and not expired and self.rebuild.owed is not None:", "if False:",
        "loss.py::test_a_checkpoint_that_the_next_start_passes_over_is_durable_when_that_closes",
    ),
    _row(
        "what-was-staged-only-may-be-lost", f"{_COORDINATOR}empty_loads.py",
        "lost = all(reason.lost for reason in found.reasons)", "lost = False",
        "lost_staged.py::test_a_job_whose_only_checkpoint_was_staged_on_a_lost_node_starts_from_nothing",
    ),
)  # fmt: skip

_MEMBERS = (
    _row(
        "segments-come-from-peers", f"{_COORDINATOR}locations.py",
        "if others and (save, Tier.PEER, rank) not in damaged:", "if False:",
        "members.py::test_ranks_come_back_elsewhere",
    ),
    _row(
        "segments-are-rebuilt", f"{_COORDINATOR}chunks.py",
        "if chunks and recoverable(", "if False and recoverable(",
        "members.py::test_ranks_come_back_elsewhere",
        "members.py::test_uneven_ranks_per_node[b]",
        "members.py::test_two_jobs_on_the_same_nodes_lose_one",
        "members.py::test_another_world_size_after_a_loss",
    ),
    _row(
        "nodes-that-a-job-leaves-are-asked", f"{_COORDINATOR}sessions.py",
        "else {self._node} | inside | self.visitors", "else {self._node} | inside",
        "members.py::test_ranks_come_back_elsewhere",
    ),
    _row(
        "short-columns-end-in-zeros", "ckptd/parity/engine.py",
        "            value[at:] = 0", "            pass",
        "members.py::test_shards_of_very_different_size[c]",
    ),
    _row(
        "a-load-that-is-not-strict-says-what-it-lacks", "client/ckptd_client/_load/lenient.py",
        '*_lines([*objects, *alone], "not in the checkpoint, and kept as it was"),', "",
        "members.py::test_a_load_that_is_not_strict[ab]",
    ),
    _row(
        "only-ranks-that-are-in-count", f"{_NODE}node.py",
        "event.session and not self.ranks.is_in(event):", "event.session and False:",
        "members.py::test_ranks_that_were_replaced_are_refused",
    ),
    _row(
        "a-node-that-slept-puts-its-ranks-out", f"{_NODE}ranks.py",
        'if order.code == "stale" and admitted is not None and', "if False and admitted is not None and",
        "members.py::test_a_node_that_froze_wakes_up_in_a_job_that_went_on_without_it",
    ),
    _row(
        "a-daemon-adopts-slots", "ckptd/daemon/adoption.py",
        "nameless = [slot for slot in slots if not self._slot(slot, jobs)]", "nameless = []",
        "members.py::test_a_daemon_restarted_where_no_rank_lives_any_more",
    ),
)  # fmt: skip

_MISSING = (
    _row(
        "missing-ranks-have-places", f"{_COORDINATOR}missing_ranks.py",
        "causes += self._places(sorted([*idle, *unattached]))", "causes += []",
        "missing_ranks.py::test_ranks_of_another_node_are_named_with_that_node",
    ),
    _row(
        "all-nodes-that-saved-learn-who-is-missing", f"{_COORDINATOR}missing_ranks.py",
        "nodes = sorted({node for nodes in record.held.values() for node in nodes})", "nodes = [self._node]",
        "missing_ranks.py::test_ranks_away_from_the_coordinator_learn_it_too",
    ),
    _row(
        "a-silent-coordinator-is-named", f"{_NODE}ranks.py",
        "actions += self.save_waits(ev.SaveWaits(", "str(ev.SaveWaits(",
        "missing_ranks.py::test_a_coordinator_whose_daemon_died_is_named_on_the_other_nodes",
    ),
)  # fmt: skip

_STATUS = (
    _row(
        "status-has-the-ranks-of-its-own-node", "ckptd/daemon/status_query.py",
        "        ranks=own.ranks,\n", "",
        "status.py::test_any_daemon_reports_all_nodes_and_ranks_of_a_drain_that_runs",
    ),
    _row(
        "a-silent-daemon-is-waited-for-briefly", "ckptd/daemon/status_query.py",
        "return not self._left or now >= self.deadline", "return not self._left",
        "status.py::test_a_daemon_that_does_not_answer_is_named_and_costs_less_than_a_second",
    ),
    _row(
        "status-names-who-did-not-answer", "ckptd/daemon/status_query.py",
        "silent=[node for node in query.asked.get(job, ()) if node not in answers],", "silent=[],",
        "status.py::test_without_its_coordinator_a_node_reports_what_it_knows",
    ),
    _row(
        "questions-do-not-replace-each-other", "ckptd/daemon/status_service.py",
        "self._waiting.append(waiting)", "self._waiting = [waiting]",
        "status.py::test_who_asks_twice_at_once_is_answered_twice",
    ),
    _row(
        "status-shows-the-drain-of-each-node", "ckptd/cli/view/nodes.py",
        "    if job.drain is not None:\n        yield", "    if False:\n        yield",
        "status.py::test_the_readme_shows_what_is_shown_today",
    ),
    _row(
        "a-hung-store-is-a-problem-of-its-node", "ckptd/daemon/status_service.py",
        'worker.problem or (f"{key.store} gives no answer" if worker.silent else "")', "worker.problem",
        "status.py::test_a_store_that_hangs_for_another_node_is_reported_with_its_name",
    ),
    _row(
        "only-the-coordinator-knows-the-steps", "ckptd/daemon/steps_service.py",
        "if job is not None and job.node.coordinator == self._node:", "if job is not None:",
        "steps.py::test_every_node_names_the_same_steps_at_once",
    ),
    _row(
        "steps-are-those-of-the-store", f"{_COORDINATOR}saves.py",
        "self._facts.on_store |= there", "self._facts.on_store |= {}",
        "steps.py::test_a_new_start_knows_what_the_store_has",
    ),
    _row(
        "a-silent-coordinator-is-an-error", "ckptd/daemon/steps_service.py",
        "        if now >= question.until:\n            return _silent",
        "        if False:\n            return _silent",
        "steps.py::test_a_coordinator_that_does_not_answer_is_an_error_with_its_name",
    ),
    _row(
        "a-question-is-asked-again", "ckptd/daemon/steps_service.py",
        "(now >= question.again_at or question.asked != coordinator)", "question.asked != coordinator",
        "steps.py::test_a_coordinator_that_restarts_meanwhile_answers",
    ),
)  # fmt: skip

_TWO_LOST = (
    _row(
        "double-bears-two-losses", f"{_COORDINATOR}chunks.py",
        "if chunks and recoverable(", "if chunks and len(lost) == 1 and recoverable(",
        "two_lost.py::test_two_nodes_lost_at_once[double-ac]",
        "two_lost.py::test_a_node_is_lost_of_which_a_rebuild_takes_bytes[double]",
    ),
    _row(
        "a-load-says-why-it-reads-the-store", f"{_COORDINATOR}restores.py",
        'reasons += [Reason(f"{save}: {why}", lost=False)] if why else []', "del why",
        "two_lost.py::test_two_nodes_lost_at_once[xor-ac]",
    ),
    _row(
        "a-load-says-what-was-lost", f"{_COORDINATOR}restores.py",
        "reasons.append(self._lost(r, save, lost))", "del lost",
        "two_lost.py::test_two_lost_under_xor_with_nothing_on_the_store_falls_back_to_what_is_there_and_says_why",
    ),
    _row(
        "a-rebuild-is-done-again", f"{_COORDINATOR}chunks.py",
        "if chunks and recoverable(", "if False and recoverable(",
        "two_lost.py::test_the_node_that_rebuilds_is_lost_too[rebuild.before-seal]",
    ),
    _row(
        "others-finish-a-commit", "ckptd/core/node/succession.py",
        "actions += self._drain.finish(self._standing.incarnation, vacancy.session)", "pass",
        "two_lost.py::test_others_finish_the_commit_of_a_coordinator_that_is_lost[commit.before-rename]",
        "files.py::test_another_node_finishes_what_the_one_that_committed_did_not_live_to_do",
    ),
)  # fmt: skip

_TWO_RUNS = (
    _row(
        "saves-of-another-run-are-set-apart", f"{_COORDINATOR}lineage.py",
        "return run == save.run or (run is None and not self.is_disputed(save))", "return True",
        "two_runs.py::test_a_node_of_a_run_that_was_started_over_adds_nothing_to_the_newer_one",
        "two_runs.py::test_a_run_on_a_store_that_was_not_mounted_adds_nothing_to_the_one_before",
        "campaigns.py::test_no_load_of_this_history_mixes_two_runs",
    ),
    _row(
        "a-commit-looks-for-a-takeover", "ckptd/store/posix/commit.py",
        "taken_over = taken_over_by(records, save, by) if by is not None else 0", "taken_over = 0",
        "two_runs.py::test_an_older_run_gets_no_durable_once_a_newer_one_has_begun_elsewhere",
    ),
    _row(
        "no-store-is-made-where-one-is-remembered", "ckptd/store/interface.py",
        "if found is None and wanted != ANY_STORE and (named or remembered):", "if False:",
        "two_runs.py::test_no_store_is_made_silently_where_an_arena_remembers_another_one",
        "two_runs.py::test_a_node_without_memory_that_joins_one_with_memory_makes_no_store_either",
    ),
    _row(
        "a-store-that-is-asked-for-must-be-there", "ckptd/store/interface.py",
        "if found is None and named and named not in remembered:", "if found is None and named and (named := ''):",
        "two_runs.py::test_a_store_id_that_is_asked_for_and_is_not_there_is_an_error",
    ),
    _row(
        "manifests-remember-their-store", "ckptd/store/posix/identity.py",
        "    if (found := _id_in_manifests(fs, store, job)) is not None:\n        return found\n    try:",
        "    try:",
        "two_runs.py::test_a_manifest_remembers_its_store_when_no_memory_does",
    ),
    _row(
        "a-job-stays-on-its-store", f"{_COORDINATOR}session_store.py",
        "        if self.takes(here):", "        if True:",
        "two_runs.py::test_a_job_goes_on_only_on_the_store_that_it_is_saved_to_whatever_its_daemons_forgot",
    ).beside(
        "ckptd/store/interface.py", "if found is not None and known and found not in known:", "if False:",
    ),
    _row(
        "a-store-that-may-be-none-is-warned-of", "ckptd/store/posix/identity.py",
        'warning = lost or (_volatile(store) if store_id is None else "")', "warning = lost",
        "two_runs.py::test_a_first_store_on_tmpfs_is_made_with_a_warning_that_names_its_device_and_mount",
        "two_runs.py::test_a_first_store_on_the_root_file_system_is_made_with_a_warning_that_names_its_device",
    ),
    _row(
        "a-new-store-is-made", "ckptd/store/interface.py",
        "made, warnings = self.make(found)", 'made, warnings = found or "", []',
        "two_runs.py::test_the_first_run_on_a_new_store_works_and_so_does_the_second",
    ),
)  # fmt: skip

_CAMPAIGNS = (
    _row(
        "a-closed-job-leaves-no-memory", f"{_COORDINATOR}leave.py",
        "if not (self.closing or expired) or self._session.peopled:", "if True:",
        "campaigns.py::test_promises_hold_through_these_disturbances",
    ),
    _row(
        "campaigns-clean-up", f"{FAULTS}campaigns.py",
        "before = {end: signal.signal(end, leave) for end in _ENDS}", "before = {}",
        "campaigns.py::test_a_campaign_that_is_asked_to_end_leaves_nothing",
    ),
    _row(
        "all-nodes-say-their-step-first", "ckptd/core/preemption.py",
        "return [] if self._awaited else self._fix(self._highest + 1)", "return self._fix(self._highest)",
        "polite.py::test_each_polite_kill_leaves_one_durable_step_on_all_ranks[0]",
    ),
    _row(
        "a-daemon-that-ends-says-what-is-not-durable", "ckptd/daemon/stopping.py",
        "            log.error(line(text,", "            str(line(text,",
        "polite.py::test_what_does_not_fit_in_the_time_costs_nothing_that_is_durable_and_is_said",
    ),
)  # fmt: skip

ROWS = (
    *_DAMAGE, *_FILES, *_LINKS, *_LOSS, *_MEMBERS, *_MISSING, *_STATUS, *_TWO_LOST, *_TWO_RUNS, *_CAMPAIGNS,
)  # fmt: skip
