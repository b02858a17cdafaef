"""A journal's way from the coordinator to the store: on a real arena and a real store, in this process."""

import os

import msgspec
import pytest

from ckptd.arena.known_stores import KnownStores
from ckptd.core.actions import KeepEntry, ScanStore, TakeIncarnation
from ckptd.core.jobs import Catalogue
from ckptd.core.policy import Policy
from ckptd.daemon import accounts, step_marks
from ckptd.daemon import journals as module
from ckptd.daemon.journals import FLUSH_NBYTES, FLUSH_S, MAX_KEPT_NBYTES, Journals
from ckptd.daemon.step_marks import StepMarks
from ckptd.history.account import account_of
from ckptd.history.runs import runs_of
from ckptd.shared.base.ids import JobKey
from ckptd.shared.format import arena_paths
from ckptd.shared.format.integrity import XXH3
from ckptd.shared.protocol import journal as log
from ckptd.store.journal import read_journal
from ckptd.store.journal_messages import AccountRead, ReadAccount
from ckptd.store.messages import MAIN, Done, Failed, lane_of
from ckptd.store.opening import open_store
from ckptd.store.worker import put_journal, read_account
from tests.runs import OTHER_RUN, RUN

SMALL = log.Steps(at=0, step=1)
LARGE = log.Problem(at=0, text="x" * log.MAX_TEXT_CHARS)
LARGE_NBYTES = len(log.framed(LARGE))


class Clock:
    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def time(self):
        return 1.7e9 + self.now


class Worker:
    """In place of the process: it carries a request out at once, or hangs, or fails."""

    def __init__(self, url):
        self.store = open_store(url, XXH3)
        self.asked, self.read, self.waiting, self.retired = [], [], [], []
        self.hangs, self.problem, self.whole = False, "", 0  # whole: journals that were read to their end

    def ask(self, _store, make, answer):
        request = make(len(self.asked))
        assert lane_of(request) != MAIN, "nobody waits for a journal"
        (self.read if isinstance(request, ReadAccount) else self.asked).append(request)
        if self.hangs:
            self.waiting.append((request, answer))
        else:
            self.answer(request, answer)

    def answer(self, request, answer):
        if self.problem:
            answer(Failed(request.id, "os", self.problem, self.problem, ""))
            return
        if isinstance(request, ReadAccount):
            read = read_account(self.store, request)
            self.whole += read.account is not None
            answer(Done(request.id, msgspec.msgpack.decode(msgspec.msgpack.encode(read), type=AccountRead)))
            return
        put_journal(self.store, request)
        answer(Done(request.id))

    def go_on(self):
        self.hangs = False
        for one in self.waiting:
            self.answer(*one)
        self.waiting = []

    def retire(self, store):
        self.retired.append(store)


class Parts:
    """A daemon's journals; ``again`` is those of the next daemon on its arena."""

    def __init__(self, tmp_path, monkeypatch):
        self.arena, url = str(tmp_path / "arena"), str(tmp_path / "store")
        os.mkdir(self.arena)
        self.job = JobKey(url, "job")
        self.clock, self.worker = Clock(), Worker(url)
        self.store_id = self.worker.store.open("job").store_id
        for one in (module, accounts, step_marks):
            monkeypatch.setattr(one, "time", self.clock)
        self.known = KnownStores(self.arena)
        self.known.remember(self.job, self.store_id)
        self.uses = True
        self.again()

    def again(self):
        self.journals = Journals(
            self.arena,
            self.worker,
            self.known,
            lambda _store: self.uses,
            StepMarks(self.arena, Catalogue("a", Policy()), print),
        )
        self.journals.adopt()

    def keep(self, entry=SMALL, *, incarnation=1, run=RUN, again=False, age_s=5.0):
        began = log.RunBegan(
            at=0, incarnation=incarnation, run=run, world_size=1, nodes=1, coordinator="a", again=again
        )
        self.journals.keep(KeepEntry(job=self.job, began=began, entry=entry, age_s=age_s))

    def after(self, seconds):
        self.clock.now += seconds
        due = self.journals.next_deadline()
        assert due is None or due > self.clock.now - seconds - 1, "the loop would spin"
        self.journals.tick()

    @property
    def read(self):
        found = read_journal(self.worker.store.files("job"))
        assert not found.damaged
        return found.entries

    @property
    def steps(self):
        return [entry.step for entry in self.read if isinstance(entry, log.Steps)]

    @property
    def kept(self):
        folder = os.path.join(self.arena, arena_paths.job_dir(self.job))
        return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


@pytest.fixture
def parts(tmp_path, monkeypatch):
    return Parts(tmp_path, monkeypatch)


def test_records_are_put_after_a_while_with_their_times_and_their_run_first(parts):
    parts.keep()
    parts.after(1)
    assert parts.worker.asked == []
    parts.after(FLUSH_S)
    began, entry = parts.read
    assert (began.at, began.again, entry.at) == (1.7e9 + 995, False, 1.7e9 + 1000)
    assert parts.journals.next_deadline() is None, "an idle journal costs nothing"


def test_the_end_of_a_run_and_many_bytes_are_put_at_once(parts):
    parts.keep(log.RunEnded(at=0, how="closed"))
    parts.after(0)
    assert len(parts.read) == 2
    for _ in range(FLUSH_NBYTES // LARGE_NBYTES + 1):
        parts.keep(LARGE)
    parts.after(0)
    assert len(parts.worker.asked) == 2


def test_a_segment_is_put_whole_until_it_is_full_and_goes_from_the_arena_then(parts):
    count = 0
    while len(parts.kept) < 2:
        parts.keep(LARGE)
        count += 1
        if count % 100 == 0:
            parts.after(FLUSH_S)
    parts.after(FLUSH_S)
    parts.after(FLUSH_S)
    assert [request.first for request in parts.worker.asked[:2]] == [True, False]
    assert len({request.name for request in parts.worker.asked}) == 2
    assert len(parts.kept) == 1, "what is on the store and will not grow is not kept"
    runs = [entry.again for entry in parts.read if isinstance(entry, log.RunBegan)]
    assert runs == [False, True]
    assert sum(isinstance(entry, log.Problem) for entry in parts.read) == count


def test_another_run_begins_another_segment(parts):
    parts.keep(log.Steps(at=0, step=1))
    parts.keep(log.Steps(at=0, step=2), incarnation=2, run=OTHER_RUN)
    parts.after(FLUSH_S)
    parts.after(FLUSH_S)
    assert [type(entry).__name__ for entry in parts.read] == ["RunBegan", "Steps"] * 2
    assert [entry.incarnation for entry in parts.read if isinstance(entry, log.RunBegan)] == [1, 2]


def test_the_next_daemon_of_the_arena_puts_what_the_last_one_could_not(parts):
    staged = log.Staged(at=0, counter=1, step=10, nbytes=1, seconds=1.0)
    parts.keep(staged)
    parts.again()
    parts.keep(staged, again=True)  # its coordinator has found the save
    parts.keep(log.Steps(at=0, step=20), again=True)
    parts.after(FLUSH_S)
    parts.after(FLUSH_S)
    assert [type(entry).__name__ for entry in parts.read] == ["RunBegan", "Staged", "RunBegan", "Steps"]
    assert [entry.again for entry in parts.read if isinstance(entry, log.RunBegan)] == [False, True]


def test_a_daemon_whose_arena_is_lost_overwrites_nothing(parts, tmp_path):
    parts.keep(log.Steps(at=0, step=1))
    parts.after(FLUSH_S)
    parts.arena = str(tmp_path / "other")
    os.mkdir(parts.arena)
    parts.clock.now += 100
    parts.again()
    parts.keep(log.Steps(at=0, step=2), again=True)
    parts.after(FLUSH_S)
    assert parts.steps == [1, 2]


def test_a_store_that_fails_gets_it_later_and_nothing_is_lost(parts):
    parts.worker.problem = "ENOSPC"
    for number in range(20):
        parts.keep(log.Steps(at=0, step=number))
        parts.after(FLUSH_S)
    assert len(parts.worker.asked) < 10, "each failure makes the pause longer"
    parts.worker.problem = ""
    parts.after(module._MAX_PAUSE_S)
    assert parts.steps == list(range(20))


def test_a_store_that_hangs_has_one_request_and_costs_the_oldest_records(parts):
    parts.worker.hangs = True
    total = 4 * MAX_KEPT_NBYTES // LARGE_NBYTES
    for number in range(total):
        parts.keep(LARGE)
        parts.keep(log.Steps(at=0, step=number))
        parts.after(1)
    assert len(parts.worker.asked) == 1
    folder = os.path.join(parts.arena, arena_paths.job_dir(parts.job))
    assert sum(os.path.getsize(os.path.join(folder, name)) for name in parts.kept) < 1.3 * MAX_KEPT_NBYTES
    parts.worker.go_on()
    for _ in range(20):
        parts.after(FLUSH_S)
    missing = sum(entry.records for entry in parts.read if isinstance(entry, log.Missing))
    found = sum(not isinstance(entry, log.RunBegan | log.Missing) for entry in parts.read)
    assert missing > 0
    assert found + missing == 2 * total
    assert parts.steps[-1] == total - 1, "the newest are there"


def test_no_record_goes_without_a_word_for_the_last_one(parts, monkeypatch):
    """There is no next one that could say so."""
    monkeypatch.setattr(module, "SEGMENT_NBYTES", LARGE_NBYTES)
    parts.worker.hangs = True
    for _ in range(4):
        parts.keep(LARGE)
    (journal,) = parts.journals._journals.values()
    monkeypatch.setattr(module, "MAX_KEPT_NBYTES", sum(segment.nbytes for segment in journal.segments))
    parts.keep(log.RunEnded(at=0, how="closed"))
    parts.worker.go_on()
    for _ in range(5):
        parts.after(FLUSH_S)
    missing = sum(entry.records for entry in parts.read if isinstance(entry, log.Missing))
    assert missing + sum(isinstance(entry, log.Problem) for entry in parts.read) == 4


def test_an_arena_without_room_costs_records_and_says_how_many(parts, monkeypatch):
    parts.keep()
    append = module.JournalFile.append
    monkeypatch.setattr(module.JournalFile, "append", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    for _ in range(3):
        parts.keep(incarnation=2, run=OTHER_RUN)
    monkeypatch.setattr(module.JournalFile, "append", append)
    parts.keep(incarnation=2, run=OTHER_RUN)
    for _ in range(3):
        parts.after(FLUSH_S)
    assert [type(entry).__name__ for entry in parts.read] == ["RunBegan", "Steps", "RunBegan", "Missing", "Steps"]
    assert [entry.records for entry in parts.read if isinstance(entry, log.Missing)] == [3]


def test_a_store_that_is_not_known_yet_is_asked_nothing(parts):
    parts.known.forget(parts.job)
    parts.keep()
    parts.after(FLUSH_S)
    assert parts.worker.asked == []
    parts.known.remember(parts.job, parts.store_id)
    parts.after(module._MAX_PAUSE_S)
    assert parts.steps == [1]


def test_a_job_that_is_forgotten_leaves_nothing_in_the_arena(parts):
    parts.keep()
    parts.uses = False
    parts.journals.forget(parts.job)
    assert parts.steps == [1]
    assert parts.kept == []
    assert parts.worker.retired == [parts.job.store]
    assert not parts.journals._journals


def test_the_journal_of_a_job_that_was_forgotten_while_its_store_failed_goes_with_the_daemon(parts):
    parts.worker.problem = "EIO"
    parts.keep()
    parts.journals.forget(parts.job)
    parts.known.forget(parts.job)
    assert parts.kept
    parts.worker.problem = ""
    parts.after(module._MAX_PAUSE_S)
    assert (parts.steps, parts.kept) == ([1], []), "the store is remembered as long as this daemon lives"
    parts.keep()
    parts.again()
    assert parts.kept == []


def test_the_moment_that_it_waits_is_part_of_the_time_that_it_has_to_end(parts):
    now = parts.clock.now
    parts.worker.hangs = True
    parts.keep()
    assert parts.journals.ending(now, now + 3.0)
    assert parts.journals.ending(now + 2.9, now + 3.0)
    assert not parts.journals.ending(now + 3.0, now + 3.0)
    parts.keep()
    assert not parts.journals.ending(now + 3.0, now + 3.0), "not even for a record that came meanwhile"


def test_what_is_due_later_goes_to_the_store_while_the_last_drain_runs(parts):
    parts.keep()
    parts.journals.put_now(parts.clock.now)
    assert parts.steps == [1]
    assert not parts.journals.ending(parts.clock.now, parts.clock.now), "nothing is left to wait for"


def test_a_daemon_that_ends_waits_a_moment_for_a_store_and_not_for_one_that_hangs(parts):
    assert not parts.journals.ending(parts.clock.now)
    parts.keep()
    assert not parts.journals.ending(parts.clock.now), "it is put at once"
    assert parts.steps == [1]
    parts.worker.hangs = True
    parts.keep()
    assert parts.journals.ending(parts.clock.now)
    assert parts.journals.ending(parts.clock.now + module._LAST_S - 0.1)
    assert not parts.journals.ending(parts.clock.now + module._LAST_S)
    parts.journals.close(remove=True)
    assert parts.kept == []


def test_what_lies_in_an_arena_and_is_no_journal_is_left_out(parts, caplog):
    parts.keep()
    folder = os.path.join(parts.arena, arena_paths.job_dir(parts.job))
    (name,) = parts.kept
    for other, content in (("short", b"\x01"), ("foreign", b"\xff" * 4096), ("named", b"")):
        with open(os.path.join(folder, other + arena_paths.JOURNAL_SUFFIX), "wb") as file:
            file.write(content)
    elsewhere = os.path.join(parts.arena, arena_paths.JOBS, "other-01234567")
    os.mkdir(elsewhere)
    os.link(os.path.join(folder, name), os.path.join(elsewhere, name))
    parts.again()
    assert caplog.text.count("journal cannot be read") == 4
    parts.after(FLUSH_S)
    assert parts.steps == [1]


# --- what the runs have come to


def account(parts):
    return parts.journals.accounts.of(parts.job)


def told(parts):
    """Counts of the account, and those of the journal as it lies on the store."""
    return account(parts).totals(), account(parts).ends


def staged(counter):
    return log.Staged(at=0, counter=counter, step=counter, nbytes=8, seconds=0.5)


def test_the_account_is_read_once_and_goes_on_with_each_record(parts):
    parts.keep(staged(1))
    assert account(parts) is None, "nobody knows yet what was before"
    parts.after(0.2)
    for counter in range(2, 6):
        parts.keep(staged(counter))
    parts.after(FLUSH_S)
    assert len(parts.worker.read) == 1
    assert account(parts).totals().staged_nbytes == 40
    whole = account_of(parts.read)
    assert told(parts) == (whole.totals(), whole.ends)
    assert account(parts).goodput(0.0) == whole.goodput(0.0)


def test_records_that_come_while_the_journal_is_read_count_once(parts):
    parts.keep(staged(1))
    parts.worker.hangs = True
    parts.after(0.2)
    parts.keep(staged(2))
    parts.keep(staged(3))
    parts.worker.go_on()
    assert account(parts).totals().staged_nbytes == 24


def test_the_next_daemon_of_the_arena_goes_on_whatever_the_store_has_of_it(parts):
    parts.keep(staged(1))
    parts.after(FLUSH_S)
    parts.keep(staged(2))
    parts.after(0.2)
    before = told(parts)
    parts.again()
    parts.keep(staged(3), again=True)
    parts.after(0.2)
    assert account(parts).totals().staged_nbytes == before[0].staged_nbytes + 8 == 24
    assert account(parts).totals().runs == 1


def test_a_segment_that_left_the_arena_meanwhile_counts_as_far_as_it_was_known(parts):
    """It is on the store then, with more."""
    parts.keep(staged(1))
    parts.worker.hangs = True
    parts.after(0.2)
    parts.keep(staged(2))
    parts.keep(log.RunEnded(at=0, how="closed"))
    (read,) = parts.worker.read
    parts.worker.hangs = False
    parts.after(FLUSH_S)
    parts.keep(staged(1), incarnation=2, run=OTHER_RUN)
    parts.after(FLUSH_S)
    assert not os.path.exists(read.segments[0].path)
    parts.worker.go_on()
    assert account(parts).totals().staged_nbytes == 24
    assert account(parts).totals().runs == 2


def test_a_store_that_fails_is_asked_again_and_until_then_nothing_is_known(parts):
    parts.worker.problem = "EIO"
    parts.keep(staged(1))
    for _ in range(20):
        parts.after(5.0)
    assert account(parts) is None
    assert 3 < len(parts.worker.read) < 12, "later and later"
    parts.worker.problem = ""
    parts.after(600.0)
    assert account(parts).totals().staged_nbytes == 8


def test_too_many_records_meanwhile_are_read_again(parts, monkeypatch):
    monkeypatch.setattr(accounts, "_MAX_WAITING", 4)
    parts.keep(staged(1))
    parts.worker.hangs = True
    parts.after(0.2)
    for counter in range(2, 8):
        parts.keep(staged(counter))
    parts.worker.go_on()
    assert account(parts) is None
    parts.after(2.0)
    assert account(parts).totals().staged_nbytes == 56


def test_a_number_that_is_taken_has_the_journal_read_again(parts):
    """Another node may have coordinated a run meanwhile."""
    parts.keep(staged(1))
    parts.after(FLUSH_S + 1)
    other = log.Name(2, OTHER_RUN.hex()[:8], "00000000", 1)
    run = log.RunBegan(at=1.8e9, incarnation=2, run=OTHER_RUN, world_size=1, nodes=1, coordinator="b")
    parts.worker.store.records("job").put(other.path, log.segment(map(log.framed, [run, staged(1)])))
    parts.after(1.0)
    assert account(parts).totals().runs == 1
    taken = TakeIncarnation(job=parts.job, session="a", at_least=3)
    parts.journals.accounts.expect(taken)
    parts.after(1.0)
    assert account(parts).totals().runs == 2


def test_an_account_never_goes_back_when_the_journal_makes_room(parts):
    for counter in range(1, 4):
        parts.keep(staged(counter))
    parts.keep(log.RunEnded(at=0, how="closed"))
    parts.after(1.0)
    parts.keep(staged(1), incarnation=2, run=OTHER_RUN)
    parts.after(FLUSH_S + 1)
    before = told(parts)
    records = parts.worker.store.records("job")
    records.drop(min(f"{log.JOURNAL_DIR}/{name}" for name in records.files.names(log.JOURNAL_DIR)))
    parts.journals.accounts.expect(TakeIncarnation(job=parts.job, session="a", at_least=3))
    parts.after(1.0)
    assert len(parts.worker.read) == 2
    assert told(parts) == before


def test_a_save_that_each_daemon_of_the_arena_finds_again_counts_once(parts):
    """As history does: the record of it lies on the store, or still in the arena."""
    parts.keep(staged(1))
    parts.keep(log.Protected(at=0, counter=1, seconds=1.0))
    parts.keep(log.Durable(at=0, counter=1, seconds=9.0, drain_s=8.0, nbytes=8))
    parts.after(0.2)
    before, shown = told(parts), account(parts).histograms.shown()
    for _ in range(3):
        parts.again()
        parts.journals.accounts.expect(ScanStore(job=parts.job))
        parts.keep(log.Staged(at=0, counter=1, step=1, nbytes=8, seconds=0.0), again=True)
        parts.keep(log.Protected(at=0, counter=1, seconds=0.0), again=True)
        parts.keep(log.Durable(at=0, counter=1, seconds=0.0, drain_s=0.0, nbytes=8), again=True)
        parts.after(FLUSH_S + 1)
        parts.after(FLUSH_S + 1)
        assert told(parts) == before
        assert account(parts).histograms.shown() == shown
        (save,) = runs_of(parts.read)[0].saves
        assert (save.staged_s, save.protected_s, save.durable_s, save.drain_s) == (0.5, 1.0, 9.0, 8.0)


def put_by_another(parts, number, *records):
    """A segment of a daemon on another node."""
    name = log.Name(2, OTHER_RUN.hex()[:8], "00000000", number)
    run = log.RunBegan(at=1.8e9, incarnation=2, run=OTHER_RUN, world_size=1, nodes=1, coordinator="b", again=number > 1)
    parts.worker.store.records("job").put(name.path, log.segment(map(log.framed, [run, *records])))


def look(parts):
    """A minute later."""
    parts.after(61.0)
    parts.journals.accounts.expect(ScanStore(job=parts.job))
    parts.after(1.0)


def test_looks_at_the_store_read_the_journal_again_only_where_another_writer_has_put_more(parts):
    put_by_another(parts, 1, staged(1))
    parts.keep(staged(1))
    parts.after(1.0)
    assert (parts.worker.whole, account(parts).totals().staged_nbytes) == (1, 16)
    for counter in range(2, 30):  # what the loop does after each commit
        parts.keep(staged(counter))
        parts.keep(LARGE)
        look(parts)
    assert (parts.worker.whole, len(parts.worker.read)) == (1, 1 + 28)
    assert account(parts).totals().staged_nbytes == 8 + 29 * 8
    for put in (lambda: put_by_another(parts, 1, staged(1), staged(2)), lambda: put_by_another(parts, 2, staged(3))):
        put()
        before = parts.worker.whole, account(parts).totals().staged_nbytes
        for _ in range(3):
            look(parts)
        assert (parts.worker.whole, account(parts).totals().staged_nbytes) == (before[0] + 1, before[1] + 8)


def test_what_comes_while_a_look_finds_nothing_new_counts_once(parts):
    parts.keep(staged(1))
    parts.after(FLUSH_S + 1)
    parts.worker.hangs = True
    parts.journals.accounts.expect(TakeIncarnation(job=parts.job, session="a", at_least=3))
    parts.after(1.0)
    parts.keep(staged(2))
    parts.worker.go_on()
    assert (parts.worker.whole, account(parts).totals().staged_nbytes) == (1, 16)
