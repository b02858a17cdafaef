"""Ranks that do not save while others do: what the coordinator says of them, to whom, and when."""

from ckptd.core import events as ev
from ckptd.daemon import status
from ckptd.shared.base.ids import SaveId
from ckptd.shared.base.wording import named_ranks
from ckptd.shared.protocol.messages import Notice, Progress
from ckptd.shared.protocol.topology import Peer, Topology
from tests.runs import RUN
from tests.unit.core.a_job import CAPACITY, KEY, AJob

ONE, TWO = SaveId(1, 1, 10, RUN), SaveId(1, 2, 20, RUN)
LARGE = 2 * CAPACITY
ALLOCATED = "is being allocated (client.prepare(state) does that ahead of the first save)"
CALL = "every rank must call save (one rank alone: connect(alone=True))"


def notices(job: AJob, rank: int = 0, save: SaveId = ONE) -> list[str]:
    """What the rank was told of a save that goes on waiting."""
    news = [m for m in job.told(rank) if isinstance(m, Progress) and m.save == save]
    return [m.reason for m in news if m.milestone is None and m.end is None]


def idle(job: AJob) -> bool:
    return any(m.idle for m in job.told(0) if isinstance(m, Progress))


def shown(job: AJob) -> list[str]:
    return [one.reason for one in status.checkpoints(job.catalogue.jobs[KEY], job.now)]


def test_five_seconds_of_silence_name_the_ranks_and_no_fewer():
    job = AJob(world=8).start()
    job.stage(0, ONE)
    job.tick(4.9)
    assert notices(job) == []
    assert shown(job) == [""]
    job.tick(0.2)
    (text,) = notices(job)
    assert text == f"waits for ranks 1-7: {CALL}; ranks 1-7 are pids 101-107 on node"
    assert shown(job) == [text]
    assert idle(job)
    assert notices(job, rank=1) == [], "rank 1 has not saved it, and hears nothing"


def test_two_seconds_are_enough_once_a_rank_saves_again():
    job = AJob(world=2).start()
    job.stage(0, ONE)
    job.tick(0.5)
    job.stage(0, TWO)
    job.tick(1.9)
    assert notices(job) == []
    job.tick(0.2)
    assert notices(job)[0].startswith(f"waits for rank 1: {CALL}")
    assert job.now < 3, "within 3 s of the next save"


def test_ranks_of_a_normal_job_that_differ_by_seconds_are_not_named():
    job = AJob(world=2).start()
    job.stage(0, ONE)
    job.tick(4.5)
    job.stage(1, ONE)
    job.tick(10)
    assert notices(job) == notices(job, rank=1) == []


def test_it_is_said_once_and_again_only_when_others_are_missing():
    job = AJob(world=4).start()
    job.stage(0, ONE)
    for _ in range(20):
        job.tick(2)
    assert len(notices(job)) == 1
    job.stage(2, ONE)
    job.tick(6)
    assert [text.partition(":")[0] for text in notices(job)] == ["waits for ranks 1-3", "waits for ranks 1, 3"]
    assert notices(job, rank=2) == notices(job)[1:]


def test_a_save_that_is_whole_at_last_waits_for_none():
    job = AJob(world=2).start()
    job.stage(0, ONE)
    job.tick(6)
    assert notices(job)
    job.stage(1, ONE)
    assert shown(job) == [""]
    assert [m.milestone for m in job.told(1) if isinstance(m, Progress)] == ["staged"]


def test_ranks_that_never_connected_are_named_as_such():
    job = AJob(world=4)
    job.attach(0)
    job.scan()
    job.number()
    job.slots(0)
    job.stage(0, ONE)
    job.tick(6)
    (text,) = notices(job)
    what = "every rank must call connect and save (one rank alone: connect(alone=True))"
    assert text == f"waits for ranks 1-3: they have not connected: {what}"


def test_ranks_of_a_node_that_does_not_answer_are_not_blamed():
    job = AJob(world=2).start()
    job.stage(0, ONE)
    job.sessions.members.add(1, "far")
    job.sessions.links.down.add("far")
    job.tick(6)
    assert not idle(job), "its daemon may come back: who waits for a slot goes on waiting"
    assert notices(job) == ["waits for rank 1: node far does not answer: ckptd status there"]


def test_ranks_of_another_node_may_have_lost_their_daemon_before_it_is_known():
    job = AJob(world=2).start()
    job.stage(0, ONE)
    job.sessions.members.add(1, "far")
    for seconds in (6, 5):
        job.tick(seconds)
        assert not idle(job)
    job.tick(5)
    assert idle(job)
    assert len(set(notices(job))) == 1, "the client says it once"


def test_a_rank_whose_slots_are_being_allocated_is_inside_save_and_not_accused():
    job = AJob(world=2).start()
    job.ask(1, capacity=LARGE)
    job.stage(0, ONE)
    for _ in range(10):
        job.tick(6)
    assert notices(job) == [f"waits for rank 1: the memory of its slots {ALLOCATED}"]
    assert shown(job) == notices(job)
    assert not idle(job), "it saves: who waits for a slot goes on waiting"


def test_a_rank_that_got_its_slot_has_time_to_copy_before_it_is_accused():
    job = AJob(world=2).start()
    job.ask(1, capacity=LARGE)
    job.stage(0, ONE)
    job.tick(4)
    job.ready(1, LARGE)
    for _ in range(4):
        job.tick(1.2)
        assert notices(job) == []
    job.tick(0.3)
    assert notices(job) == [f"waits for rank 1: {CALL}; rank 1 is pid 101 on node"]
    assert idle(job)


def test_ranks_that_do_not_save_are_named_beside_those_whose_slots_are_allocated():
    job = AJob(world=4).start()
    for rank in (1, 2):
        job.ask(rank, capacity=LARGE)
    job.stage(0, ONE)
    job.tick(6)
    (text,) = notices(job)
    assert text == (
        f"waits for ranks 1-3: {CALL}; the memory of the slots of ranks 1-2 {ALLOCATED}; rank 3 is pid 103 on node"
    )
    job.stage(3, ONE)
    job.tick(6)
    assert notices(job)[1:] == [f"waits for ranks 1-2: the memory of their slots {ALLOCATED}"]


def test_slots_that_cannot_be_had_are_allocated_no_more():
    job = AJob(world=2).start()
    job.ask(1, capacity=LARGE)
    job.stage(0, ONE)
    job.say(ev.SlotsFailed(job=KEY, rank=1, count=3, code="budget", message="no room", hint=""))
    job.tick(6)
    assert notices(job) == [f"waits for rank 1: {CALL}; rank 1 is pid 101 on node"]


def test_a_second_slot_that_is_being_allocated_holds_none_up():
    job = AJob(world=2).start()
    job.ask(1, capacity=LARGE)
    job.ready(1, LARGE)
    job.stage(0, ONE)
    job.tick(6)
    assert notices(job) == [f"waits for rank 1: {CALL}; rank 1 is pid 101 on node"]


def test_a_save_that_was_found_in_memory_waits_for_no_rank_of_today():
    """A restarted daemon finds halves; whether they are whole is known once every node has said what it has."""
    job = AJob(world=2)
    name = "r00000-000001.slot"
    job.say(ev.SlotAdopted(job=KEY, rank=0, slot=name, capacity=4096, world_size=2, save=ONE, nbytes=10))
    job.did += job.catalogue.adopted(KEY, job.now)
    job.tick(6)
    assert shown(job) == [""]


def restarted(*, world: int = 2, back: tuple[int, ...] = (0,)) -> AJob:
    """A daemon that found rank 0's part of a save, and the ranks' processes; these have called it since."""
    job = AJob(world=world)
    topology = Topology((Peer("node", "arena", "", "k" * 40),), (0,) * world)
    job.say(ev.TopologyKept(job=KEY, session="a", topology=topology, epoch=1, since=1))
    name = "r00000-000001.slot"
    job.say(ev.SlotAdopted(job=KEY, rank=0, slot=name, capacity=4096, world_size=world, save=ONE, nbytes=10))
    for rank in range(world):
        job.say(ev.RankFound(job=KEY, rank=rank, session="a", pid=100 + rank, host="host"))
    job.did += job.catalogue.adopted(KEY, job.now)
    job.scan()
    for rank in back:
        job.attach(rank, incarnation=1)
    return job


def test_a_save_that_was_found_in_memory_waits_for_ranks_that_have_not_called_the_daemon_that_restarted():
    job = restarted(world=3)
    job.tick(4.9)
    assert notices(job) == [], "its time begins with the daemon's"
    job.tick(0.2)
    text = (
        f"waits for ranks 1-2: {CALL}; "
        "ranks 1-2 have not called ckptd since the daemon of their nodes restarted; ranks 1-2 are pids 101-102 on node"
    )
    assert notices(job) == shown(job) == [text]
    assert not idle(job), "they may be inside save"
    job.attach(1, incarnation=1)
    job.tick(6)
    assert "; rank 2 has not called ckptd since the daemon of its node restarted; ranks 1-2 are" in shown(job)[0]
    job.stage(1, ONE, slot=granted(job, 1))
    job.stage(2, ONE, slot=granted(job, 2))
    assert shown(job) == [""]


def granted(job: AJob, rank: int) -> str:
    if rank not in job.node.ranks.admitted:
        job.attach(rank, incarnation=1)
    job.slots(rank)
    return job.idle(rank)


def test_a_rank_that_comes_back_later_receives_for_whom_its_save_waits():
    job = restarted(world=3, back=(1,))
    job.tick(6)
    assert notices(job) == []
    seq = job.attach(0, incarnation=1)
    (news,) = job.answer(seq).known
    assert news.reason.startswith("waits for ranks 1-2: ")


def test_a_rest_of_a_save_that_is_older_than_a_whole_one_waits_for_none():
    job = restarted(world=1)
    for rank in (0, 1):
        job.say(ev.SlotAdopted(
            job=KEY, rank=rank, slot=f"r0000{rank}-000009.slot", capacity=4096, world_size=2, save=TWO, nbytes=10
        ))  # fmt: skip
    job.tick(6)
    assert not [text for text in shown(job) if "waits for" in text]


def test_a_process_that_lives_and_has_not_called_yet_has_not_ended():
    job = restarted(world=2)
    name = "r00001-000001.slot"
    job.say(ev.SlotAdopted(job=KEY, rank=1, slot=name, capacity=4096, world_size=2, save=None))
    zero, one = status.ranks(job.catalogue.jobs[KEY])
    assert (zero.alive, zero.attached) == (True, True)
    assert (one.alive, one.attached, one.pid, one.host) == (True, False, 101, "host")
    job.gone(1)
    assert [(rank.alive, rank.attached) for rank in status.ranks(job.catalogue.jobs[KEY])] == [
        (True, True),
        (False, True),
    ]


def test_many_ranks_fit_into_one_line():
    assert named_ranks([3]) == "rank 3"
    assert named_ranks([1, 3, 4, 5]) == "ranks 1, 3-5"
    assert named_ranks(list(range(0, 200, 2))) == "ranks 0, 2, 4, 6, 8, 10, 12, 14, ... (100 in all)"


def load_notices(job: AJob, rank: int) -> list[Notice]:
    return [m for m in job.told(rank) if isinstance(m, Notice)]


def test_a_load_that_some_ranks_do_not_call_names_them_once_to_the_lowest_that_did():
    job = AJob(world=4).start()
    job.ask_load(1)
    job.ask_load(3)
    job.hold()
    job.tick(4.9)
    assert load_notices(job, 1) == []
    job.tick(0.2)
    call = "every rank must call load (one rank alone: connect(alone=True)); ranks 0, 2 are pids 100, 102 on node"
    assert load_notices(job, 1) == [Notice(call="load", message="waits for ranks 0, 2", hint=call)]
    job.tick(20)
    assert len(load_notices(job, 1)) == 1
    assert load_notices(job, 0) == load_notices(job, 3) == []


def test_a_load_that_all_ranks_call_names_none_however_long_the_store_takes():
    job = AJob(world=2).start()
    job.ask_load(0)
    job.ask_load(1)
    job.tick(20)
    assert load_notices(job, 0) == load_notices(job, 1) == []
