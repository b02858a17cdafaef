"""Guards of saves and loads of one node: their bytes, their cost, the ranks that take part, their publication."""

from tests.guards.guard import FAULTS
from tests.guards.guard import fault_guard as _row

_COORDINATOR = "ckptd/core/coordinator/"
_NODE = "ckptd/core/node/"
_CLIENT = "client/ckptd_client/"
_DAEMON = "ckptd/daemon/"

_BYTES = (
    _row(
        "a-block-of-a-slot-is-checked", f"{_CLIENT}_load/reader.py",
        "source.check(index, found.value())", "pass",
        "bit_flips.py::test_a_bit_in_a_slot_falls_back_to_the_same_step_on_the_store[block 1]",
        "bit_flips.py::test_a_bit_in_a_slot_that_is_not_committed_falls_back_to_an_older_step",
        "bit_flips.py::test_arena_and_store_both_damaged_name_both",
    ),
    _row(
        "verify-reads-every-block", "ckptd/checkpoint/verify_image.py",
        'report.problem(inside[0].path, f"digest', '_ = (inside[0].path, f"digest',
        "bit_flips.py::test_a_bit_in_a_committed_file_falls_back_to_an_older_step[block 1]",
        "bit_flips.py::test_no_bit_of_a_checkpoint_is_missed_by_verify",
    ),
    _row(
        "a-vote-is-the-one-that-is-pinned", "ckptd/shared/format/stored_records.py",
        "if (len(raw), files.integrity.digest(raw, Purpose.VOTE_FILE)) != (ref.nbytes, ref.digest):", "if not raw:",
        "bit_flips.py::test_a_bit_in_a_committed_file_falls_back_to_an_older_step[vote]",
    ),
    _row(
        "a-vote-names-the-parity", f"{_NODE}drain.py",
        "parity=self.parity.record,", "parity=None,",
        "drained_parity.py::test_an_image_is_lost_from_the_store_after_all_nodes_are",
        "drained_parity.py::test_trainers_files_are_lost_from_the_store_after_all_nodes_are",
    ),
)  # fmt: skip

_BUDGETS = (
    _row(
        "a-drain-waits-for-its-turn", "ckptd/store/image.py",
        "time.sleep(max(0.0, due_s - time.monotonic()))", "del due_s",
        "budgets.py::test_a_large_drain_keeps_to_the_cap",
        "budgets.py::test_many_small_drains_keep_to_the_cap_together",
    ),
    _row(
        "the-worker-is-nice", "ckptd/system/niceness.py",
        "        os.nice(self.cpu)\n", "",
        "budgets.py::test_every_thread_of_the_worker_stands_back_and_none_of_the_daemon",
    ),
    _row(
        "ends-are-counted", f"{_COORDINATOR}job_state.py",
        "return self._past + Counter(record.end for record in self.records.values() if record.end is not None)",
        "return self._past",
        "budgets.py::test_saves_ten_times_faster_than_the_store_take_no_byte_beyond_the_budget",
    ),
    _row(
        "a-skipped-save-is-counted", f"{_COORDINATOR}saves.py",
        "self._end(record, On.SKIPPED, f", "self._end(record, On.CLASHED, f",
        "budgets.py::test_a_save_that_finds_no_slot_beside_a_slow_drain_is_skipped_and_counted",
    ),
    _row(
        "a-cadence-counts-seconds", "ckptd/core/coordinator/drains.py",
        "or (cadence.seconds > 0 and now - last[1] >= cadence.seconds)", "or cadence.seconds > now",
        "budgets.py::test_a_cadence_in_seconds_drains_one_in_so_many",
    ),
    _row(
        "multiples-stay", f"{_COORDINATOR}retention.py",
        "if save not in pinned and not (keep_every and save.step % keep_every == 0)]", "if save not in pinned]",
        "budgets.py::test_multiples_and_pins_stay_with_the_newest",
    ),
    _row(
        "what-others-removed-is-forgotten", f"{_COORDINATOR}saves.py",
        "for save in removed_by_others(self._facts.on_store, there, self.fence.present):", "for save in ():",
        "budgets.py::test_what_prune_removed_beside_a_live_daemon_is_not_promised_any_more",
    ),
)  # fmt: skip

_SAVES = (
    _row(
        "an-interrupted-save-has-an-end", f"{_CLIENT}_save/saving.py",
        "            staging.note_failure(handle, error, deadline=time.monotonic() + _SKIP_NOTICE_S)\n", "",
        "client_review.py::test_a_save_that_is_interrupted_has_ended_and_the_next_one_works",
    ),
    _row(
        "training-sees-no-fault-of-a-save", f"{_CLIENT}_save/saving.py",
        "except Exception as error:  # noqa: BLE001 - training continues", "except MemoryError as error:  #",
        "client_review.py::test_no_fault_of_the_staging_part_reaches_training",
        "client_review.py::test_a_daemon_that_cannot_be_started_is_no_fault_of_training",
    ),
    _row(
        "a-lost-rank-file-is-made-again", f"{_CLIENT}_daemon/link.py",
        "if self._rank_file is not None and self._rank_file.lost:", "if False:",
        "client_review.py::test_an_arena_that_was_wiped_is_made_again",
    ),
    _row(
        "a-save-waits-for-the-client-only-so-long", f"{_CLIENT}_save/saving.py",
        "if mine else self._refused(save)", "",
        "client_review.py::test_a_save_that_cannot_have_the_client_ends_failed",
    ),
    _row(
        "dropped-records-receive-updates", f"{_CLIENT}_local/save_record.py",
        "handle = self._alive.get(item.save)\n            if handle is not None:\n                handle.hear",
        "handle = self._handles.get(item.save)\n            if handle is not None:\n                handle.hear",
        "client_review.py::test_handles_that_have_not_ended_are_kept_and_others_receive_while_they_are_held",
    ),
    _row(
        "outrun-saves-are-superseded", f"{_CLIENT}_local/save_record.py",
        "handle.fail(End.SUPERSEDED if outrun else End.FAILED, _GONE)", "handle.fail(End.FAILED, _GONE)",
        "client_review.py::test_handles_that_the_next_daemon_does_not_know_end",
    ),
    _row(
        "an-old-save-does-not-keep-a-rank-away", f"{_CLIENT}_daemon/outbox.py",
        "            except CkptdError as error:\n                self._forced",
        "            except WaitTimeoutError as error:\n                self._forced",
        "client_review.py::test_an_old_hand_over_is_no_reason_to_be_taken_for_replaced",
    ),
    _row(
        "a-staged-save-is-superseded", f"{_CLIENT}_local/save_record.py",
        "if self.known_end is End.ABANDONED and self.known_milestone is not None:", "if False:",
        "crash_points.py::test_a_save_that_was_staged_is_never_called_abandoned",
    ),
    _row(
        "an-adopted-slot-gets-its-digests", f"{_NODE}slots.py",
        "if s.save is not None and not s.digested\n        ]", "if False\n        ]",
        "crash_points.py::test_a_death_at_this_point_breaks_no_promise[stage.segment-received-stage.before-staged-told-both-2-True]",
    ),
    _row(
        "the-walk-has-workers-that-die-alone", f"{FAULTS}test_crash_points.py",
        'return "worker" if point in WORKER and number % 4 in (1, 2) else "both"', 'return "both"',
        "crash_points.py::test_the_list_that_was_walked_is_the_whole_list",
    ),
    _row(
        "a-handed-over-segment-is-not-lost", f"{_CLIENT}_save/staging.py",
        "if isinstance(error, ChannelLostError) and self.was_delivered(handle):", "if False:",
        "daemon_death.py::test_killed_while_a_save_waits_for_its_acknowledgement[1]",
    ),
    _row(
        "a-segment-follows-to-the-next-daemon", f"{_CLIENT}_daemon/outbox.py",
        "unacknowledged = list(self._unacknowledged.values())", "unacknowledged = list[HandOver]()",
        "daemon_death.py::test_a_segment_sealed_after_the_next_daemon_looked_is_handed_to_it",
    ),
    _row(
        "a-wait-looks-for-the-next-daemon", f"{_CLIENT}_save/staging.py",
        "self.link.ensure(self.link.patient_until(patience_s))", "pass",
        "rank_death.py::test_wait_ends_when_the_daemon_is_gone_for_good",
    ),
    _row(
        "a-save-is-over-at-its-deadline", f"{_CLIENT}_save/staging.py",
        "return time.monotonic() + self.save_timeout_s", "return time.monotonic() + self.save_timeout_s + 4.0",
        "daemon_death.py::test_a_daemon_that_stops_answering_never_holds_a_save_beyond_its_deadline",
        "daemon_death.py::test_a_new_daemon_that_does_not_answer_holds_no_save_either",
        "client_review.py::test_a_save_is_not_held_up_by_a_thread_that_waits",
    ),
)  # fmt: skip

_RANKS = (
    _row(
        "a-dead-rank-ends-its-saves", f"{_COORDINATOR}saves.py",
        "[rank for rank in session.departed if rank not in record.delivered]", "list[int]()",
        "rank_death.py::test_the_other_ranks_learn_that_the_save_cannot_complete[False]",
    ),
    _row(
        "a-second-start-waits", f"{_COORDINATOR}sessions.py",
        "alone = heard and (waiting.takeover or not self.processes.others(session))", "alone = heard",
        "rank_death.py::test_a_second_start_waits_then_names_who_still_runs_and_disturbs_none",
    ),
    _row(
        "replaced-ranks-are-refused", f"{_NODE}node.py",
        "event.session and not self.ranks.is_in(event):", "event.session and False:",
        "rank_death.py::test_takeover_replaces_old_ranks_which_then_harm_nothing",
    ),
    _row(
        "the-newest-is-of-the-newest-incarnation", f"{_COORDINATOR}restores.py",
        "key=lambda save: save.listed, reverse=True", "key=lambda save: save.step, reverse=True",
        "rank_death.py::test_a_restart_from_an_older_step_saves_the_same_steps_again",
    ),
    _row(
        "ranks-agree-on-the-step", f"{_COORDINATOR}saves.py",
        "        if clash is not None:\n", "        if False:\n",
        "rank_death.py::test_ranks_that_save_different_steps_fail_and_the_next_save_is_whole",
    ),
    _row(
        "a-save-waits-only-so-long", f"{_COORDINATOR}saves.py",
        "if now - record.since >= self._policy.stage_timeout_s:", "if False:",
        "rank_death.py::test_a_rank_that_never_saves_ends_the_wait_of_the_others",
    ),
    _row(
        "a-read-takes-only-so-long", f"{_COORDINATOR}restores.py",
        "return r.ordered + self._policy.read_timeout_s", "return r.ordered + 600 * self._policy.read_timeout_s",
        "rank_death.py::test_a_rank_that_hangs_in_its_read_ends_the_load_of_the_others",
    ),
    _row(
        "a-dead-rank-holds-no-slot", f"{_NODE}node.py",
        "return [*self.ranks.drop(event.rank, event.session), ", "return [",
        "rank_death.py::test_a_segment_cut_off_by_a_kill_is_never_offered_and_its_slot_is_free_again",
    ),
    _row(
        "a-dropped-channel-is-closed", f"{_CLIENT}_daemon/channel.py",
        "weakref.finalize(self, _close, self._socket, self._monitor, self._context, os.getpid())",
        "weakref.finalize(self, int)",
        "dropped_client.py::test_a_client_that_is_dropped_without_close_holds_none_up",
    ),
)  # fmt: skip

_MISSING = (
    _row(
        "ranks-learn-who-does-not-save", f"{_COORDINATOR}missing_ranks.py",
        "record.waits_for = said.text", "str(said.text)",
        "missing_ranks.py::test_silence_of_five_seconds_is_ended_on_stderr_and_in_the_status[save]",
        "missing_ranks.py::test_a_wait_that_ends_too_early_says_whom_it_waited_for",
    ),
    _row(
        "the-next-save-ends-the-silence", f"{_COORDINATOR}missing_ranks.py",
        "*(since + SAVED_AGAIN_S for since in later)", "",
        "missing_ranks.py::test_the_next_save_brings_it_within_three_seconds",
    ),
    _row(
        "saves-that-cannot-get-a-slot-end", f"{_CLIENT}_local/save_record.py",
        "return bool(late) and len(waiting)", "return False and len(waiting)",
        "missing_ranks.py::test_saves_without_a_slot_end_at_once_with_the_true_reason",
    ),
    _row(
        "the-last-rank-completes-a-save", f"{_COORDINATOR}saves.py",
        "complete = SAVE.takes(record.state, On.WHOLE) and record.in_memory", "complete = False",
        "missing_ranks.py::test_ranks_that_come_after_all_make_it_whole",
    ),
    _row(
        "ranks-that-did-not-come-back-are-named", f"{_COORDINATOR}missing_ranks.py",
        "unattached = [rank for rank in absent if self._is_unattached(rank)]", "unattached = []",
        "missing_ranks.py::test_a_daemon_that_restarted_names_them_and_who_has_not_called_it_since",
    ),
    _row(
        "a-thread-ends-with-the-process", f"{_CLIENT}_save/listening.py",
        "if not waiting or not main.is_alive():", "if not waiting:",
        "daemon_death.py::test_a_process_whose_daemon_died_ends_at_once[0.5]",
    ).beside(
        f"{_CLIENT}_save/listening.py", "self._staging = weakref.ref(staging)", "self._staging = lambda: staging",
    ).beside(
        f"{_CLIENT}_save/listening.py", "if staging is not None and main.is_alive():", "if staging is not None:",
    ),
    _row(
        "dcp-saves-on-all-ranks", f"{_CLIENT}dcp/_writer.py",
        "if len(plans) != self._client.group.world_size:", "if False:",
        "missing_ranks.py::test_dcp_on_one_rank_is_refused_at_once",
    ),
)  # fmt: skip

_PUBLISHED = (
    _row(
        "the-next-daemon-publishes-what-is-left", f"{_DAEMON}publishing.py",
        "self._ask(job, self._publications.due(job))", "del job",
        "publish.py::test_the_next_trainer_has_what_an_earlier_daemon_left",
    ),
    _row(
        "a-publication-is-finished-by-the-next-daemon-or-for-a-rank-that-hears", f"{_DAEMON}publishing.py",
        "self._ask(job, self._publications.due(job))", "del job",
        "publish.py::test_a_daemon_that_dies_while_it_publishes[publish.before-pointer]",
    ).beside(f"{_DAEMON}publishing.py", "if self._publications.is_due(job, save) and (job", "if () and (job"),
    _row(
        "a-publication-without-a-place-is-reported", "ckptd/store/posix/publish.py",
        "notes.append(_unknown(os.path.join(job_dir(key), name), why))", "del why",
        "publish.py::test_a_publication_whose_arena_was_lost_is_reported_and_made_by_hand",
    ),
    _row(
        "a-commit-has-the-intents", f"{_DAEMON}publishing.py",
        "return self._publications.from_on(job, save)", "return []",
        "publish.py::test_a_trainer_that_dies_before_the_drain_ends",
    ),
    _row(
        "a-rank-that-cannot-save-tells-the-others", f"{_CLIENT}_save/staging.py",
        "self.note_failure(handle, error, deadline=deadline if mine else None)",
        "self.note_failure(handle, error, deadline=None)",
        "publish.py::test_what_one_rank_cannot_pickle_ends_the_save_on_all_at_once",
    ),
)  # fmt: skip

ROWS = (*_BYTES, *_BUDGETS, *_SAVES, *_RANKS, *_MISSING, *_PUBLISHED)  # fmt: skip
