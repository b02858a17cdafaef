"""What a status asks of other daemons: their progress while a drain runs, their reports if they are wanted."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.daemon.pace import Pace
from ckptd.daemon.status_query import decode_answer
from ckptd.daemon.status_service import Sources, StatusService
from ckptd.peers.packets import Answered, Ask
from ckptd.peers.views import Received
from ckptd.shared.protocol.messages import AskStatus
from tests.unit.core.nodes.a_cluster import KEY, ONE, TWO, ACluster


class Planes:
    """The control plane between the services of a cluster's nodes."""

    def __init__(self, cluster):
        self.asked, self.apart, self.called = [], set(), []
        self.mail = {name: [] for name in cluster.nodes}
        self.answers = {name: [] for name in cluster.nodes}
        self.services = {name: self._service(name, node) for name, node in cluster.nodes.items()}

    def _service(self, name, node):
        limit = SimpleNamespace(name="Shmem")
        arena = SimpleNamespace(
            path="/a", budget_nbytes=lambda: 1, used_nbytes=0, budget=lambda: SimpleNamespace(tightest=limit)
        )
        plane = SimpleNamespace(
            write=lambda job, other, body: self._write(name, other, body),
            call=lambda job, other: self._call(name, other),
            take_mail=lambda: [self.mail[name].pop(0) for _ in list(self.mail[name])],
            problems=list, refused=SimpleNamespace(total=lambda: 0),
        )  # fmt: skip
        stores = SimpleNamespace(status=list)
        sources = Sources(
            name,
            arena,
            node.catalogue,
            stores,
            plane,
            Pace(plane),
            account=lambda _: None,
            refused=lambda: 0,
            problems=list,
        )
        return StatusService(sources, lambda _, reply: self.answers[name].append(reply.status))

    def _write(self, sender, receiver, body):
        if frozenset((sender, receiver)) in self.apart:
            return False
        self.asked += [(sender, receiver)] if isinstance(body, Ask) else []
        self.mail[receiver].append(Received(sender, body))
        return True

    def _call(self, sender, receiver):
        """The link comes up a moment later, unless the node does not answer."""
        self.called.append((sender, receiver))
        return receiver != "d"

    def ask(self, name, *, nodes=False):
        incoming = SimpleNamespace(identity=b"", request=AskStatus(seq=1, nodes=nodes))
        self.services[name].asked(incoming)
        for _ in range(3):
            for one in self.services.values():
                one.read_mail()
        self.services[name].tick(0.0)
        (status,) = self.answers[name]
        return status.jobs[0]


@pytest.fixture
def draining():
    """Four nodes that write a save; each has said to itself how far it is."""
    cluster = ACluster()
    cluster.held = {act.Drain}
    cluster.connect("abcd")
    cluster.stage(ONE)
    for number, node in enumerate(cluster.nodes.values()):
        cluster.say(node, ev.DrainMoved(job=KEY, save=ONE, by_rank=((number, number + 1),)))
    cluster.settle()
    return cluster


def test_a_plain_status_of_the_coordinator_asks_those_that_write(draining):
    planes = Planes(draining)
    job = planes.ask("a")
    assert planes.asked == [("a", other) for other in "bcd"]
    assert (job.drain.nbytes_done, job.drain.nbytes) == (10, 40)
    assert [node.drain_nbytes_done for node in job.nodes] == [1, 2, 3, 4]
    assert (job.silent, [node.report for node in job.nodes]) == ([], [None] * 4)


def test_the_progress_of_one_save_is_not_shown_for_another(draining):
    planes = Planes(draining)
    assert planes.ask("a").drain.nbytes_done == 10
    facts = draining.nodes["a"].job.coordinator.facts
    facts.records[TWO] = replace(facts.records[ONE], save=TWO)
    facts.active = TWO
    planes.answers["a"].clear()
    planes.services["a"]._others = lambda job, *, whole: []  # it has just asked
    job = planes.ask("a")
    assert job.drain.save == TWO
    assert [node.drain_nbytes_done for node in job.nodes] == [0, 0, 0, 0]


def test_without_a_drain_no_node_is_asked_and_another_daemon_never_asks(draining):
    quiet = ACluster()
    quiet.connect("abcd")
    planes = Planes(quiet)
    assert (planes.ask("a").drain, planes.asked) == (None, [])
    planes = Planes(draining)
    assert (planes.ask("b").drain, planes.asked) == (None, [])


def test_the_survey_of_nodes_shows_the_same_progress_wherever_it_is_asked_for(draining):
    seen = [Planes(draining).ask(name, nodes=True) for name in "ab"]
    assert [job.drain.nbytes_done for job in seen] == [10, 10]
    assert [node.report is not None for job in seen for node in job.nodes] == [True] * 8


def test_a_survey_calls_nodes_without_a_link(draining):
    planes = Planes(draining)
    planes.apart = {frozenset("bc"), frozenset("bd")}
    incoming = SimpleNamespace(identity=b"", request=AskStatus(seq=1, nodes=True))
    service = planes.services["b"]
    service.asked(incoming)
    assert (planes.asked, planes.called) == ([("b", "a")], [("b", "c"), ("b", "d")])
    assert service.next_deadline() <= time.monotonic() + 0.02
    planes.apart = set()
    service.tick(0.0)
    assert planes.asked == [("b", "a"), ("b", "c")]
    for one in (*planes.services.values(), service):
        one.read_mail()
    service.tick(0.0)
    (status,) = planes.answers["b"]
    assert (status.jobs[0].silent, status.jobs[0].drain.nbytes_done) == (["d"], 6)


def test_who_answers_too_late_changes_nothing(draining):
    planes = Planes(draining)
    planes.mail["a"].append(Received("b", Answered(7, b"late")))
    planes.services["a"].read_mail()
    assert decode_answer(planes.services["b"]._answer_about(KEY, draining.nodes["b"].job)).job is None
