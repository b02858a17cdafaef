"""Guards of one daemon: its life, its stores, its keys, its memory, and what it forgets."""

from tests.guards.guard import FAULTS
from tests.guards.guard import fault_guard as _row

_COORDINATOR = "ckptd/core/coordinator/"
_NODE = "ckptd/core/node/"
_CLIENT = "client/ckptd_client/"
_DAEMON = "ckptd/daemon/"

_DAEMONS = (
    _row(
        "a-daemon-looks-for-its-arena", f"{_DAEMON}loop.py",
        "self._homeless = not self._arena.in_place()", "self._homeless = False",
        "daemon_death.py::test_a_daemon_whose_arena_was_removed_makes_room_for_another",
    ),
    _row(
        "connect-may-start-no-daemon", f"{_CLIENT}_daemon/reach.py",
        "    if here:\n", "    if True:\n",
        "daemon_death.py::test_without_a_daemon_connect_says_so_when_it_may_not_start_one",
    ),
    _row(
        "an-empty-daemon-leaves", f"{_DAEMON}loop.py",
        "if not self._config.exit_when_empty:", "if True:",
        "daemon_death.py::test_a_client_starts_a_daemon_and_says_so_and_it_leaves_when_it_is_empty",
    ),
    _row(
        "an-arena-has-one-daemon", "ckptd/arena/arena.py",
        "        if fd is None:\n", "        if fd is None and (fd := os.open(self.path, os.O_RDONLY)) < 0:\n",
        "daemon_death.py::test_eight_ranks_that_start_a_daemon_at_once_end_with_one",
    ),
    _row(
        "clients-start-the-next-daemon", f"{_CLIENT}_daemon/link.py",
        "self.is_restartable = self.settings.autostart and answer.client_started", "self.is_restartable = False",
        "daemon_death.py::test_a_daemon_that_a_client_started_comes_back_by_itself",
    ),
    _row(
        "a-lost-channel-is-opened-again", f"{_CLIENT}_daemon/link.py",
        "        if self._channel is not None and not self._channel.lost:\n            return",
        "        if self._channel is not None:\n            return",
        "daemon_death.py::test_saves_go_on_with_a_daemon_that_was_started_again",
    ),
    _row(
        "what-must-be-drained-is-said-again", f"{_CLIENT}_daemon/outbox.py",
        "*(one for one in self._forced.values() if one not in unacknowledged)", "",
        "daemon_death.py::test_a_save_that_was_to_be_drained_for_sure_is_so_by_the_next_daemon",
    ),
    _row(
        "saves-do-not-wait-for-no-daemon-again", f"{_CLIENT}_daemon/link.py",
        "if hurried and now < self._retry_at and", "if False and",
        "daemon_death.py::test_without_its_daemon_training_goes_on_and_saves_say_why_they_failed",
    ),
    _row(
        "a-death-is-reported", f"{_CLIENT}_save/lost_daemon.py",
        "            _warn_once(link, _ended(link, waiting))\n", "",
        "daemon_death.py::test_a_death_is_said_within_seconds_and_the_next_daemon_is_found",
        "daemon_death.py::test_of_what_only_this_memory_has_a_death_is_said_too",
        "daemon_death.py::test_a_save_that_waits_for_ranks_learns_of_it_on_any_rank",
    ),
    _row(
        "the-next-daemon-is-started-without-a-call", f"{_CLIENT}_save/lost_daemon.py",
        "(_listens(link) or (link.is_restartable and now >= self._others_until))", "_listens(link)",
        "daemon_death.py::test_a_daemon_that_a_client_started_is_started_again_without_a_call",
    ),
    _row(
        "what-was-lost-is-named", f"{_CLIENT}_save/lost_daemon.py",
        "lost = [handle for handle in named if handle.known_end is End.FAILED]", "lost = list[SaveRecord]()",
        "daemon_death.py::test_what_was_lost_with_the_memory_is_said_when_the_next_daemon_is_found",
    ),
    _row(
        "a-daemon-that-ends-finishes-its-drain", f"{_DAEMON}stopping.py",
        "return not any(job.coordinator.facts.active for job in self._catalogue.jobs.values())", "return True",
        "daemon_death.py::test_sigterm_finishes_the_drain_that_runs",
        "stop_and_forget.py::test_stop_with_wait_reports_the_commit_it_waited_for",
        "stop_and_forget.py::test_a_wait_that_is_too_short_says_so_and_the_daemon_goes_on_stopping",
    ),
    _row(
        "the-next-daemon-adopts-what-was-staged", f"{_DAEMON}adoption.py",
        "nameless = [slot for slot in slots if not self._slot(slot, jobs)]", "nameless = []",
        "daemon_death.py::test_what_a_stop_leaves_unfinished_the_next_start_finishes",
        "client_review.py::test_a_handle_does_not_wait_for_ever_for_a_daemon_that_was_replaced_twice",
        "daemon_death.py::test_a_waiting_handle_is_enough_to_bring_the_sealed_segment_home",
    ),
)  # fmt: skip

_STORES = (
    _row(
        "a-stop-waits-only-so-long", f"{_DAEMON}stopping.py",
        "if self.asked > 1 or now >= self.until:", "if self.asked > 1:",
        "hung_store.py::test_a_store_that_hangs_in_a_drain_stops_that_drain_and_nothing_else",
        "polite_kill.py::test_a_store_that_is_away_does_not_hold_it_beyond_its_time",
    ),
    _row(
        "a-load-says-that-the-store-is-silent", f"{_COORDINATOR}restores.py",
        'self._round.notes.append(f"the store did not answer: {event.problem}")', "pass",
        "hung_store.py::test_load_from_memory_needs_no_store_and_says_what_it_did_without",
    ),
    _row(
        "a-silent-store-may-have-a-checkpoint", f"{_COORDINATOR}empty_loads.py",
        "    if silent:\n", "    if False:\n",
        "hung_store.py::test_load_with_nothing_in_memory_is_an_error_not_a_fresh_start",
    ),
    _row(
        "each-store-has-its-worker", "ckptd/store/workers.py",
        "state = self._stores.setdefault(store, _Store(store))",
        "state = next(iter(self._stores.values()), None) or self._stores.setdefault(store, _Store(store))",
        "hung_store.py::test_a_hung_store_harms_no_job_on_another_store",
    ),
    _row(
        "durable-means-published", "ckptd/store/posix/commit.py",
        "unpublished = publish(fs, key, save, intents)", 'unpublished = ""',
        "hung_store.py::test_a_save_is_durable_when_the_directory_of_its_trainer_no_longer_hangs",
    ),
    _row(
        "a-drain-is-tried-again-soon", f"{_COORDINATOR}drains.py",
        "self._facts.retry_at = now + pause", "self._facts.retry_at = now + 600 * pause",
        "hung_store.py::test_a_full_store_is_tried_again_until_there_is_room",
    ),
    _row(
        "a-thread-starts-the-worker", "ckptd/store/workers.py",
        "start=self._starting.submit, ", "",
        "hung_store.py::test_a_worker_that_cannot_be_started_while_its_python_hangs_holds_nothing_up",
    ),
    _row(
        "a-file-is-read-without-o-direct", "ckptd/shared/files/regular.py",
        "    leave_direct(fd)\n", "",
        "forwarding_store.py::test_a_job_saves_to_it_and_loads_from_it",
        "forwarding_store.py::test_threads_that_read_one_file_all_get_its_bytes",
        "forwarding_store.py::test_what_verify_calls_whole_is_read[load]",
        "forwarding_store.py::test_doctor_reads_back_as_a_restore_does",
    ),
    _row(
        "the-fuse-store-opens-with-o-direct", f"{FAULTS}mounts.py",
        "fi.fh = self._opened(path, fi.flags & ~os.O_CREAT)",
        "fi.fh = self._opened(path, fi.flags & ~os.O_CREAT & ~os.O_DIRECT)",
        "forwarding_store.py::test_the_store_does_what_it_is_there_for",
    ),
    _row(
        "doctor-reads-what-it-wrote", "ckptd/doctor/rules.py",
        '    if not error:\n        return _ok("store read"', '    if True:\n        return _ok("store read"',
        "forwarding_store.py::test_doctor_finds_a_store_that_a_restore_could_not_read",
    ),
)  # fmt: skip

_KEYS = (
    _row(
        "keyed-bytes-are-read-with-their-key", "ckptd/shared/format/integrity.py",
        "        if (kind, key_id) != (self.kind, self.key_id):\n", "        if False:\n",
        "integrity.py::test_readers_and_verbs_with_and_without_the_key",
        "integrity.py::test_a_keyed_job_passes_unkeyed_checkpoints_over",
    ),
    _row(
        "client-and-daemon-have-one-key", f"{_CLIENT}_daemon/rendezvous.py",
        "if info.integrity != integrity.label:", "if False:",
        "integrity.py::test_daemon_and_client_with_other_settings_find_out_at_connect",
    ),
    _row(
        "a-keyed-digest-has-the-key", "ckptd/shared/format/integrity.py",
        "        return self._blake3(data, key=self._keys[purpose]).digest(DIGEST_NBYTES)",
        "        return digest(data) if purpose is Purpose.BLOCK else self._blake3(data).digest(DIGEST_NBYTES)",
        "integrity.py::test_a_forged_checkpoint",
    ),
    _row(
        "other-programs-checkpoints-prove-nothing", f"{_CLIENT}_load/foreign/load_from.py",
        "if integrity.keyed:  #", "if False:  #",
        "integrity.py::test_a_checkpoint_without_its_records_is_no_other_programs",
    ),
    _row(
        "a-started-daemon-gets-the-key", f"{_CLIENT}_daemon/settings.py",
        "return Proof(found, (*flags, *map(str, path)))", "return Proof(found)",
        "integrity.py::test_a_daemon_that_connect_starts_has_the_key_that_connect_was_given",
    ),
    _row(
        "a-key-is-in-no-log", "ckptd/store/worker_link.py",
        "            self.send(UseKey(integrity.key))\n",
        '            __import__("logging").getLogger("ckptd").info(integrity.key.hex())\n'
        "            self.send(UseKey(integrity.key))\n",
        "integrity.py::test_a_key_is_on_no_command_line_and_in_no_log",
    ),
    _row(
        "verbs-read-the-file-of-settings", "ckptd/cli/common.py",
        "told = {one.variable: str(parsed(one, toml[one.key], str(path))) for one in settings if one.key in toml}",
        "told = dict[str, str]()",
        "integrity.py::test_verbs_take_the_key_from_where_the_daemon_has_it",
    ),
)  # fmt: skip

_MEMORY = (
    _row(
        "a-first-save-waits-for-its-memory", f"{_CLIENT}_daemon/link.py",
        "until = max(deadline, self._allocated_by) if self.allocating else deadline", "until = deadline",
        "slow_memory.py::test_the_first_save_waits_for_slots_that_are_on_their_way",
        "slow_memory.py::test_a_state_that_grew_waits_for_its_larger_slots",
    ),
    _row(
        "slow-memory-is-named", f"{_CLIENT}_save/saving.py",
        "if not self._staging.link.all_granted:", "if False:",
        "slow_memory.py::test_a_second_save_that_finds_no_slot_says_that_its_memory_is_on_its_way",
        "slow_memory.py::test_memory_that_takes_too_long_is_named_as_the_reason",
    ),
    _row(
        "first-slots-come-first", f"{_DAEMON}action_executor.py",
        "self._allocating.run(number, lambda:", "self._allocating.run(0, lambda:",
        "slow_memory.py::test_a_first_slot_is_made_before_the_second_ones_of_others",
    ),
    _row(
        "slots-that-hold-a-save-are-not-coming", f"{_NODE}slots.py",
        "return self._per_rank - sum(slot.save is not None for slot in self.of_rank(rank))",
        "return self._per_rank + 1",
        "slow_memory.py::test_slots_that_hold_checkpoints_are_no_memory_that_comes",
    ),
    _row(
        "a-daemon-that-ended-gives-no-slot", f"{_CLIENT}_daemon/link.py",
        "                if self._channel is not None and self._channel.lost:\n", "                if False:\n",
        "slow_memory.py::test_a_daemon_that_ends_meanwhile_is_seen_at_once",
    ),
    _row(
        "memory-is-reserved", "ckptd/arena/arena.py",
        "            if need <= min(have, own):\n", "            if True:\n",
        "small_shm.py::test_prepare_refuses_with_the_numbers_and_the_setting",
        "small_shm.py::test_a_save_that_does_not_fit_fails_its_handle_and_training_goes_on",
        "small_shm.py::test_a_state_that_outgrows_the_memory_leaves_the_last_checkpoint_alone",
        "small_shm.py::test_two_ranks_that_fit_only_one_by_one_are_reported_and_none_dies",
    ),
    _row(
        "small-slots-stay-until-the-larger-fit", f"{_NODE}slots.py",
        "return [AllocateSlots(job=self._job, rank=rank, count=missing, capacity=capacity, instead=instead)]",
        "return [*self._give_way(rank), AllocateSlots(job=self._job, rank=rank, count=missing, capacity=capacity)]",
        "small_shm.py::test_sizes_that_fitted_before_a_state_that_was_too_large_fit_again"
        "[1-others take what is free]",
    ),
    _row(
        "slots-have-their-pages", "ckptd/arena/slot_memory.py",
        "os.posix_fallocate(", "os.ftruncate and len(",
        "small_shm.py::test_memory_that_others_take_after_the_slots_were_made_harms_no_save",
    ),
    _row(
        "pages-are-kept-for-small-files", "ckptd/shared/files/spare_pages.py",
        "if error.errno not in _FULL or not _give(arena):", "if True:",
        "full_shm.py::test_ranks_come_back_to_what_lies_in_a_full_memory[lives-1]",
        "full_shm.py::test_a_memory_that_fills_while_ranks_live_does_not_keep_a_second_job_out",
        "full_shm.py::test_a_daemon_that_clients_start_serves_a_full_memory",
        "full_shm.py::test_a_process_that_takes_each_page_that_is_freed_keeps_no_rank_out",
    ),
    _row(
        "a-full-memory-says-what-to-free", "ckptd/shared/files/spare_pages.py",
        "        if error.errno not in (*_FULL, errno.EFBIG):\n", "        if True:\n",
        "full_shm.py::test_a_node_with_nothing_but_a_full_memory_loads_from_the_store_or_says_what_to_free",
        "full_shm.py::test_a_daemon_that_finds_no_page_says_so_in_one_line",
        "full_shm.py::test_a_memory_without_a_file_left_is_reported_as_such",
    ),
    _row(
        "a-drained-slot-is-closed", "ckptd/store/drain.py",
        "        self._map.close()\n        os.close(self._fd)\n", "        self._map.close()\n",
        "growth.py::test_saves_leave_neither_memory_nor_descriptors_behind",
    ),
    _row(
        "a-load-has-memory-made", f"{_CLIENT}_save/preparing.py",
        "            staging.ask_slots(plan.capacity(values.plain.nbytes), deadline)\n        except Exception",
        "            del deadline\n        except Exception",
        "slow_memory.py::test_a_load_has_slow_memory_made_before_the_first_save",
    ),
)  # fmt: skip

_FORGOTTEN = (
    _row(
        "stop-says-what-stays", "ckptd/cli/stop.py",
        "        click.echo(_sentence(one))\n", "        pass\n",
        "stop_and_forget.py::test_stop_ends_the_daemon_and_says_what_stays_in_memory",
        "stop_and_forget.py::test_a_daemon_that_is_killed_while_it_stops_is_not_waited_for",
    ),
    _row(
        "stop-says-whether-it-waited", "ckptd/cli/stop.py",
        "stopped=wait, ", "stopped=True, ",
        "stop_and_forget.py::test_stop_with_wait_returns_when_the_drain_that_runs_is_done",
    ),
    _row(
        "stop-names-what-is-not-known", "ckptd/cli/stop.py",
        "durable=newest.milestone == Milestone.DURABLE if job.store_seen else None,",
        "durable=newest.milestone == Milestone.DURABLE,",
        "stop_and_forget.py::test_stop_does_not_call_a_step_not_durable_while_the_store_has_not_answered",
    ),
    _row(
        "stop-names-what-the-store-answered", "ckptd/core/coordinator/saves.py",
        "self._facts.store_problem = event.problem", "self._facts.store_problem = str()",
        "stop_and_forget.py::test_stop_names_what_a_store_that_is_no_longer_there_answers",
    ),
    _row(
        "forget-frees-slots", "ckptd/core/jobs.py",
        "slots = [UnlinkSlot(job=key, slot=slot.name) for slot in job.node.slots]", "slots = list[Action]()",
        "stop_and_forget.py::test_forget_frees_a_dead_job_and_says_how_much",
    ),
    _row(
        "forget-keeps-what-nothing-else-has", "ckptd/core/jobs.py",
        "        if lost and not force:\n", "        if False:\n",
        "stop_and_forget.py::test_forget_keeps_what_nothing_else_has_unless_forced",
    ),
    _row(
        "forget-looks-at-the-store", f"{_DAEMON}forget.py",
        "if scan is None:", "if True:",
        "stop_and_forget.py::test_forget_looks_at_the_store_before_it_gives_up_what_was_durable[emptied]",
    ),
    _row(
        "forget-names-the-jobs-there-are", "ckptd/cli/forget.py",
        'known = ", ".join(sorted({job.job for job in status.jobs})) or "none"', 'known = "none"',
        "stop_and_forget.py::test_forget_of_an_unknown_job_names_those_there_are",
    ),
    _row(
        "latest-follows", "ckptd/store/posix/commit.py",
        "if current is None or current < place.save:", "if current is None:",
        "while_draining.py::test_latest_and_the_last_durable_checkpoint_stay_while_a_newer_one_is_in_flight",
    ),
    _row(
        "what-dead-ranks-saved-is-drained", f"{_COORDINATOR}drains.py",
        "        return [*actions, *self._begin_drain(chosen, now)]\n", "        return actions\n",
        "while_draining.py::test_a_rank_that_is_killed_as_soon_as_save_returned_has_its_checkpoint_made_durable",
    ),
    _row(
        "loads-look-into-memory", f"{_COORDINATOR}locations.py",
        "return {r.save for r in records if r.held and (r.staged or r.save in pieced)}", "return set[SaveId]()",
        "while_draining.py::test_a_load_right_after_a_save_gets_that_save",
    ),
    _row(
        "forget-refuses-while-ranks-live", "ckptd/core/jobs.py",
        "if live or job.coordinator.sessions.wanted:", "if False:",
        "stop_and_forget.py::test_forget_refuses_while_a_rank_lives",
    ),
    _row(
        "a-file-names-its-save", "client/ckptd_client/_save/slot_writer.py",
        "for start, header in plan.image.patched_headers(save):", "for start, header in list[tuple[int, bytes]]():",
        "while_draining.py::test_steps_saved_faster_than_they_drain_each_hold_their_own_bytes",
    ),
)  # fmt: skip

ROWS = (*_DAEMONS, *_STORES, *_KEYS, *_MEMORY, *_FORGOTTEN)  # fmt: skip
