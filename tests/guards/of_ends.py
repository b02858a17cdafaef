"""Guards of the end: a daemon that is asked to end, and a job that is preempted."""

from tests.guards.guard import fault_guard as _row

_COORDINATOR = "ckptd/core/coordinator/"
_CLIENT = "client/ckptd_client/"
_DAEMON = "ckptd/daemon/"

_ENDS = (
    _row(
        "a-last-daemon-drains-the-newest", f"{_DAEMON}stopping.py",
        "            self._handle(ev.DrainAsked(job=key))\n", "",
        "polite_kill.py::test_what_was_not_due_is_drained_while_the_ranks_live",
        "polite_kill.py::test_also_where_it_gets_the_signal_together_with_ranks_that_die_of_it",
        "polite_kill.py::test_an_older_drain_that_runs_is_finished_first",
    ),
    _row(
        "a-daemon-that-ends-waits-for-the-store", f"{_DAEMON}stopping.py",
        "if self.asked > 1 or now >= self.until:", "if True:",
        "polite_kill.py::test_a_rank_that_goes_on_saving_does_not_hold_it_up",
    ),
    _row(
        "what-is-not-durable-is-logged", f"{_DAEMON}stopping.py",
        "            log.error(line(text,", "            str(line(text,",
        "polite_kill.py::test_what_cannot_be_drained_in_time_is_named_and_the_newest_durable_stays",
    ),
    _row(
        "a-unit-keeps-its-memory", f"{_DAEMON}stopping.py",
        "return self._config.exit_when_empty and not self._homeless", "return not self._homeless",
        "polite_kill.py::test_a_daemon_that_another_process_starts_again_leaves_it_in_memory",
    ),
    _row(
        "other-nodes-stay-for-the-newest", "ckptd/core/last_drain.py",
        "return not self._safe and (reachable or self._node.drain.at_work)", "return False",
        "polite_kill.py::test_daemons_of_several_nodes_stay_until_all_of_it_is_there[b]",
    ),
    _row(
        "a-signal-is-noted", f"{_CLIENT}_preempt/signals.py",
        "listener.received = listener.received or signal.Signals(number).name", "pass",
        "preempted.py::test_a_signal_to_any_rank_has_all_save_at_one_step[whom0-15]",
    ),
    _row(
        "every-node-gets-the-step", "ckptd/core/preemption.py",
        "orders: list[Action] = [self._order(name) for name in sorted(self._asked)]",
        "orders: list[Action] = [self._order(self._node)]",
        "preempted.py::test_on_several_nodes_all_save_at_one_step[0]",
    ),
    _row(
        "a-signal-is-reported-again", f"{_CLIENT}_preempt/preemption.py",
        "or (self._sent_at is not None and now < self._sent_at + _AGAIN_S)", "or self._sent_at is not None",
        "preempted.py::test_a_daemon_that_is_killed_in_between_is_notified_again",
    ).beside(
        f"{_CLIENT}_preempt/requests.py", "self._no_answer(request.what, error))\n            return False",
        "self._no_answer(request.what, error))\n            return True",
    ),
    _row(
        "processes-that-live-are-a-session", "ckptd/core/preemption.py",
        "session = sessions.living\n", "session = sessions.session\n",
        "preempted.py::test_a_daemon_to_which_no_rank_has_come_back_yet_notifies_them_all_the_same",
    ),
    _row(
        "a-drain-has-ranks-save", f"{_DAEMON}loop.py",
        "        if preempt:\n", "        if False:\n",
        "preempted.py::test_ckptd_drain_has_them_save_too",
    ),
    _row(
        "a-rank-without-a-board-asks-for-the-step", f"{_CLIENT}_preempt/preemption.py",
        "self._status_query.is_due(step) if self._report_signal(now) else False", "self._report_signal(now)",
        "preempted.py::test_a_rank_without_a_board_that_is_signalled_saves_with_all_others",
    ),
    _row(
        "a-drain-waits-for-what-ranks-save", "ckptd/cli/drain.py",
        "comes = preempt and _awaits_ranks(outcome, job)", "comes = False",
        "preempted.py::test_ckptd_drain_with_wait_returns_when_what_they_save_is_durable[False]",
    ),
    _row(
        "a-drain-may-leave-ranks-alone", f"{_DAEMON}loop.py",
        "        if preempt:\n", "        if True:\n",
        "preempted.py::test_ckptd_drain_may_leave_them_alone",
    ).beside(
        "ckptd/cli/drain.py", "if preempt or open_one or job.coordinator not in", "if True or job.coordinator not in",
    ),
    _row(
        "a-last-daemon-waits-for-ranks", "ckptd/core/last_drain.py",
        "return self._drains or self._awaits_ranks", "return self._drains",
        "preempted.py::test_sigterm_to_a_daemon_that_a_client_started_has_them_save_before_it_ends",
    ),
    _row(
        "what-a-preempted-job-saves-is-due", "ckptd/core/coordinator/drains.py",
        "or (from_step is not None and save.step >= from_step)", "or False",
        "preempted.py::test_also_without_drain_true_what_is_saved_then_is_due",
    ),
    _row(
        "ranks-that-never-ask-are-not-waited-for", "ckptd/core/last_drain.py",
        "return not agreed or (listened and (step is None or not self._is_over(step)))", "return True",
        "preempted.py::test_a_rank_that_never_asks_learns_of_nothing_and_holds_up_none",
    ),
    _row(
        "each-node-shows-the-step", "ckptd/core/preemption.py",
        "return -1 if order.step is None else order.step", "return None",
        "preempted.py::test_a_rank_without_a_board_away_from_the_coordinator_saves_with_all_others",
    ),
    _row(
        "a-drain-names-the-coordinator", "ckptd/cli/drain.py",
        '    if job.coordinator not in {"", node}:\n        outcome', "    if False:\n        outcome",
        "preempted.py::test_on_several_nodes_the_coordinators_waits_for_what_they_save_and_another_names_it",
    ),
    _row(
        "a-silent-node-is-named", "ckptd/core/preemption.py",
        "return [Note(job=self._job, text=text), *self._fix(self._highest + 1)]",
        "return [*self._fix(self._highest + 1)]",
        "preempted.py::test_a_node_that_does_not_answer_is_named_and_the_rank_that_is_past_the_step_too",
    ),
    _row(
        "signals-that-are-not-received-are-named", f"{_CLIENT}_preempt/preemption.py",
        "if self._listener.not_received and group.rank == 0:", "if False:",
        "preempted.py::test_first_asked_in_a_thread_no_signal_is_received_and_it_is_said",
    ),
    _row(
        "close-restores-handlers", f"{_CLIENT}_preempt/signals.py",
        "if not _listeners() and threading.current_thread() is threading.main_thread():", "if False:",
        "preempted.py::test_handlers_that_were_there_are_called_and_are_back_after_close",
    ),
    _row(
        "a-forked-child-takes-signals", f"{_CLIENT}_preempt/signals.py",
        "        _take_back(number)\n    _after_fork()\n", "        _take_back(number)\n",
        "preempted.py::test_a_forked_worker_is_ended_by_the_signal_as_before",
    ),
    _row(
        "a-step-is-a-number", f"{_CLIENT}_preempt/preemption.py",
        "        if type(step) is not int or step < 0:\n            step = as_step(step)\n        board = self._kept",
        "        board = self._kept",
        "preempted.py::test_what_is_no_step_is_refused",
    ),
    _row(
        "a-missing-board-is-reported-once", f"{_CLIENT}_preempt/step_board.py",
        "            if not self._warned:\n", "            if True:\n",
        "preempted.py::test_a_board_that_cannot_be_is_said_once",
    ),
)  # fmt: skip

ROWS = (*_ENDS,)  # fmt: skip
