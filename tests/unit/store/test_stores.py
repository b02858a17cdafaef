"""Stores with real workers: one that dies, hangs or is silent costs its requests an answer, never the daemon time."""

import os
import select
import signal
import socket
import subprocess
import threading
import time

from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.store import worker, worker_link, workers
from ckptd.store.messages import Commit, Done, Failed, Probe, ScanJob, Space
from ckptd.store.posix.commit import write_vote
from ckptd.store.posix.image_writer import make_set
from ckptd.store.posix.scan import Place
from ckptd.store.posix.store import PosixStore
from ckptd.system.files import FileLayer
from tests.cluster import wait_for
from tests.runs import COMMITTER, RUN, SET, give_id
from tests.signals import resume, stop
from tests.slots import make_vote, write_slot

LONG_S = 60.0


class Answers(list):
    """Answers to requests, as they come."""

    def __init__(self, stores, store):
        super().__init__()
        self.stores, self.store = stores, str(store)

    def ask(self, make=lambda i: Probe(id=i), **words):
        self.stores.ask(self.store, make, self.append, **words)

    def turn(self, count, timeout_s=60.0):
        """The daemon's loop, until so many answers are there."""
        deadline = time.monotonic() + timeout_s
        while len(self) < count:
            assert time.monotonic() < deadline, f"{len(self)} of {count} answers"
            due = self.stores.next_deadline()
            wait_s = 0.2 if due is None else min(0.2, max(0.0, due - workers.time.monotonic()))
            links = self.stores.links
            for link in select.select(links, [k for k in links if k.wants_write], [], wait_s)[0] if links else []:
                self.stores.receive(link)
            for link in self.stores.links:
                link.on_writable()
            self.stores.tick()
            with Slow.turned:
                Slow.turned.notify()
        return self


def pid(stores):
    return wait_for(lambda: stores.links[0].pid)


def test_every_request_gets_its_own_answer(make, tmp_path):
    answers = Answers(make(), tmp_path)
    for _ in range(20):
        answers.ask()
    answers.ask(lambda i: ScanJob(id=i, job="job"))
    answers.turn(21)
    assert all(isinstance(a, Done) for a in answers)
    assert sum(isinstance(a.result, Space) for a in answers) == 20
    assert len({a.id for a in answers}) == 21
    assert not answers.stores.busy


def test_stores_do_not_share_a_worker(make, tmp_path):
    stores = make()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        Answers(stores, tmp_path / name).ask()
    assert wait_for(lambda: all(link.pid for link in stores.links))
    assert len({link.pid for link in stores.links}) == 2


def test_a_worker_that_is_killed_fails_what_it_had_and_a_new_one_takes_over(make, tmp_path):
    stores = make()
    answers = Answers(stores, tmp_path)
    answers.ask()
    answers.turn(1)
    old = pid(stores)
    stop(old)
    for _ in range(3):
        answers.ask()
    os.kill(old, signal.SIGKILL)
    answers.turn(4)
    assert [a.code for a in answers[1:]] == ["worker"] * 3
    assert "died" in answers[-1].message
    assert stores.status()[0].problem
    answers.ask()
    assert isinstance(answers.turn(5)[-1], Done)
    assert pid(stores) != old
    assert not stores.status()[0].problem


def test_patience_ends_one_request_and_its_late_answer_is_ignored(make, tmp_path):
    stores = make()
    answers = Answers(stores, tmp_path)
    answers.ask()
    answers.turn(1)
    stop(pid(stores))
    answers.ask(patience_s=0.2)
    answers.ask()
    answers.turn(2)
    assert (type(answers[-1]), answers[-1].code) == (Failed, "late")
    resume(pid(stores))
    answers.turn(3)
    assert isinstance(answers[-1], Done)
    assert len(answers) == 3


def test_a_worker_that_says_nothing_is_taken_for_hung(make, tmp_path):
    stores = make()
    answers = Answers(stores, tmp_path)
    answers.ask()
    answers.turn(1)
    stores._hang_s = 2.0  # not before it runs: starting takes its time
    stop(pid(stores))
    began = time.monotonic()
    answers.ask()
    answers.ask()
    answers.turn(3)
    assert 0.4 < time.monotonic() - began < 5
    assert ["hangs" in getattr(answer, "message", "") for answer in answers] == [False, True, True], answers
    assert stores.links == []


class Threaded:
    """In the place of a worker's process: a thread of this one."""

    def __init__(self, fd, store):
        self.pid = 0
        self._thread = threading.Thread(target=self._serve, args=(socket.socket(fileno=os.dup(fd)), store), daemon=True)
        self._thread.start()

    @staticmethod
    def _serve(sock, store):
        with sock:
            worker.Worker(sock, store, leave=lambda: None).serve()

    def poll(self):
        return None if self._thread.is_alive() else 0

    def kill(self):
        pass


class Slow(FileLayer):
    """A look at a file takes a second of ``now``, one at a time, and the daemon's loop turns meanwhile."""

    now, turned = 100.0, threading.Condition()

    def size(self, path):
        with self.turned:
            assert self.turned.wait(20), "no loop turns"
            Slow.now += 1.0
        return super().size(path)

    @classmethod
    def monotonic(cls):
        return cls.now


def test_a_commit_that_goes_on_is_never_taken_for_hung(make, tmp_path, monkeypatch):
    ranks, save, key = 40, SaveId(1, 1, 100, RUN), JobKey(str(tmp_path), "demo")
    give_id(tmp_path)
    place = Place(key, save)
    make_set(FileLayer(), place, SET)
    for rank in range(ranks):
        slot = write_slot(tmp_path / "slot", key, save, rank=rank, world_size=ranks)
        with open(f"{place.partial}/{slot.layout.file}", "wb") as file:
            file.write(slot.image)
        write_vote(FileLayer(), key, make_vote(key, save, f"node{rank}", [slot], world_size=ranks))
    monkeypatch.setattr(worker_link, "_popen", lambda fd, _niceness, store: Threaded(fd, store))
    monkeypatch.setattr(worker, "open_store", lambda url, integrity: PosixStore(url, integrity, Slow()))
    for module in (worker, workers):
        monkeypatch.setattr(module, "time", Slow)
    began = Slow.monotonic()
    stores = make(hang_s=10.0)
    answers = Answers(stores, tmp_path)
    answers.ask(lambda i: Commit(id=i, job="demo", save=save, writer="test", by=COMMITTER))
    (answer,) = answers.turn(1)
    assert isinstance(answer, Done), answer
    assert Slow.monotonic() - began > 30.0, "else nothing was shown"
    assert os.path.isdir(place.final)


def test_an_idle_worker_is_never_taken_for_hung(make, tmp_path):
    stores = make()
    answers = Answers(stores, tmp_path)
    answers.ask()
    answers.turn(1)
    stores._hang_s = 2.0  # not before it runs: starting takes its time
    assert stores.next_deadline() is None
    time.sleep(2.1)
    stores.tick()
    answers.ask()
    assert isinstance(answers.turn(2)[-1], Done)


class Immortal:
    """A worker that SIGKILL does not end: it sleeps in a file system that does not answer."""

    def __init__(self, store, *, niceness, start, integrity):
        self.pid, self.ended = 0, None
        self.read, self.write = os.pipe()

    def fileno(self):
        return self.read

    def send(self, request):
        pass

    def on_writable(self):
        pass

    wants_write = False

    def kill(self):
        os.close(self.read)
        os.close(self.write)

    def poll(self):
        return self.ended


def test_workers_that_cannot_be_killed_are_not_multiplied(make, tmp_path, monkeypatch):
    monkeypatch.setattr("ckptd.store.workers.StoreLink", Immortal)
    stores = make(hang_s=0.01)
    answers = Answers(stores, tmp_path)
    for count in range(1, 8):
        answers.ask()
        answers.turn(count)
    stuck = stores._stores[str(tmp_path)].stuck
    assert len(stuck) == 3
    assert [a.code for a in answers] == ["worker"] * 3 + ["hung"] * 4
    assert "3 workers hang" in answers[-1].message
    stuck[0].ended = -9  # the mount came back
    monkeypatch.undo()
    stores._hang_s = LONG_S
    answers.ask()
    assert isinstance(answers.turn(8)[-1], Done)


def test_closing_does_not_wait_for_one_that_hangs(make, tmp_path, monkeypatch):
    monkeypatch.setattr("ckptd.store.workers.StoreLink", Immortal)
    stores = make()
    Answers(stores, tmp_path).ask()
    began = time.monotonic()
    stores.close()
    assert time.monotonic() - began < 10
    stores._stores.clear()


def test_workers_go_with_their_daemon(make, tmp_path):
    stores = make()
    answers = Answers(stores, tmp_path)
    answers.ask()
    answers.turn(1)
    worker = pid(stores)
    stores.close()
    wait_for(lambda: not os.path.exists(f"/proc/{worker}"))


def test_a_worker_that_cannot_be_started_fails_what_it_had_with_the_reason(make, tmp_path, monkeypatch):
    answers = Answers(make(), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("sys.executable", str(tmp_path / "no-such-python"))
        answers.ask()
        (failed,) = answers.turn(1)
    assert isinstance(failed, Failed)
    assert "could not be started" in failed.message
    assert "no-such-python" in failed.message
    answers.ask()
    assert isinstance(answers.turn(2)[-1], Done)
    answers.stores.tick()
    assert not answers.stores._stores[str(tmp_path)].stuck


def test_one_that_is_given_up_before_it_runs_does_not_stay(make, tmp_path, monkeypatch):
    stores, go_on, pids = make(), threading.Event(), []
    plain = subprocess.Popen

    def slow(*args, **named):
        go_on.wait(20)
        pids.append((process := plain(*args, **named)).pid)
        return process

    monkeypatch.setattr("subprocess.Popen", slow)
    answers = Answers(stores, tmp_path)
    answers.ask()
    (link,) = stores.links
    assert link.pid == 0
    stores.retire(str(tmp_path))
    link.kill()
    assert link.poll() is None
    go_on.set()
    wait_for(lambda: link.poll() is not None)
    assert all(not os.path.exists(f"/proc/{pid}") for pid in pids)
