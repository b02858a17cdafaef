"""What is read again in the background, how fast, and what follows from what is found."""

import pytest
from msgspec.structs import replace

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.digest import BLOCK_NBYTES
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol import journal as log
from ckptd.shared.protocol.messages import Tier
from ckptd.shared.protocol.scrubbing import BEGIN, Harm, Place
from tests.runs import RUN
from tests.unit.core.nodes.a_cluster import KEY, ONE, TWO, ACluster, ANode

HOUR, DAY = 3600.0, 86400.0
RATE = 4 << 20
ON = {"scrub_memory": RATE, "scrub_memory_every_s": HOUR, "scrub_store": RATE, "scrub_store_every_s": DAY}
OURS = (act.ScrubBlock, act.ScrubPiece, act.CopyBlock, act.Mend)


def a_job(names="abcd", save=ONE, **policy) -> ACluster:
    """One rank a node; the save is protected, and durable."""
    cluster = ACluster(names, **{**ON, **policy})
    cluster.held = set(OURS)
    cluster.connect(names)
    cluster.stage(save)
    assert cluster.store.committed == {save: len(names)}
    return cluster


def take(cluster: ACluster, kind=act.ScrubBlock) -> dict[str, act.Action]:
    """What each node was ordered of that kind and has not answered, at most one."""
    found = {node.name: action for node, action in cluster.waiting if isinstance(action, kind)}
    cluster.waiting = [(node, action) for node, action in cluster.waiting if not isinstance(action, kind)]
    return found


def reading(cluster: ACluster, name: str = "c", seconds: float = HOUR + 1) -> act.ScrubBlock:
    """What the node reads when that time has passed; the others find nothing wrong."""
    cluster.tick(seconds)
    found = take(cluster)
    for other, action in found.items():
        if other != name:
            scrubbed(cluster, other, action, last=True)
    return found[name]


def scrubbed(cluster: ACluster, name: str, action: act.ScrubBlock, **words) -> None:
    event = ev.BlockScrubbed(job=KEY, name=action.name, save=action.save, **{"nbytes": BLOCK_NBYTES, **words})
    say(cluster, name, event)


def say(cluster: ACluster, name: str, event: ev.Event) -> None:
    cluster.say(cluster.nodes[name], event)
    cluster.settle()


def records(cluster: ACluster) -> list[log.Damaged]:
    found = (one.entry for node in cluster.nodes.values() for one in node.records)
    return [entry for entry in found if isinstance(entry, log.Damaged)]


def notes(node: ANode) -> list[str]:
    return [text for text in node.notes if text.startswith("scrub")]


def damaged(cluster: ACluster, name: str = "a") -> list[tuple]:
    return [(spot.node, spot.tier, spot.rank) for spot, _ in cluster.nodes[name].job.scrub.damaged]


# --- memory


def test_what_was_staged_is_read_an_hour_later_and_then_again():
    cluster = a_job()
    cluster.tick(HOUR - 10)
    assert take(cluster) == {}
    cluster.tick(11)
    first = take(cluster)
    assert set(first) == set("abcd")
    assert {action.save for action in first.values()} == {ONE}
    for name, action in first.items():
        scrubbed(cluster, name, action, last=True)
    for _ in range(3):  # the other item of each node, its parity
        cluster.tick(BLOCK_NBYTES / RATE + 1)
        for name, action in take(cluster).items():
            scrubbed(cluster, name, action, last=True)
    cluster.tick(HOUR / 2)
    assert take(cluster) == {}
    cluster.tick(HOUR / 2 + 30)
    assert set(take(cluster)) == set("abcd")
    assert not any(notes(node) for node in cluster.nodes.values())


def test_the_rate_is_kept():
    cluster = a_job()
    began, nbytes = cluster.now, 0
    while cluster.now < began + 3 * HOUR:
        cluster.tick(1.0)
        for name, action in take(cluster).items():
            scrubbed(cluster, name, action, last=action.block == 20)
            nbytes += BLOCK_NBYTES if name == "c" else 0
    assert nbytes > 20 * BLOCK_NBYTES
    assert nbytes <= RATE * (cluster.now - began - HOUR) + BLOCK_NBYTES


def test_it_waits_for_saves_drains_and_encodes():
    cluster = a_job()
    cluster.held |= {act.Drain}
    cluster.stage(TWO)
    cluster.tick(2 * HOUR)
    assert take(cluster) == {}
    cluster.held = set(OURS)
    waiting, cluster.waiting = cluster.waiting, []
    for node, action in waiting:
        cluster.perform(node, action)
    cluster.settle()
    cluster.tick(HOUR + 1)
    assert set(take(cluster)) == set("abcd")


def test_a_damaged_segment_is_rebuilt_from_the_set():
    cluster = a_job()
    action = reading(cluster)
    before = [slot for slot, one in cluster.nodes["c"].slots.items() if one.save == ONE]
    scrubbed(cluster, "c", action, damage="block 0 does not match")
    after = [slot for slot, one in cluster.nodes["c"].slots.items() if one.save == ONE]
    assert len(after) == 1
    assert after != before
    (text,) = notes(cluster.nodes["c"])
    assert text == (
        "scrub: rank 2 of step 10 is damaged in memory: block 0 does not match; made good from the parity of its set"
    )
    (entry,) = records(cluster)
    assert (entry.node, entry.tier, entry.rank, entry.step, entry.mended) == (
        "c", Tier.ARENA, 2, 10, "the parity of its set"
    )  # fmt: skip
    assert damaged(cluster) == damaged(cluster, "c") == []
    found = cluster.nodes["c"].job.scrub.findings
    assert (found.found, found.mended) == (1, 1)
    cluster.end_ranks()
    cluster.connect("abcd")
    cluster.load()
    assert set(cluster.tiers.values()) == {Tier.ARENA}


def test_what_cannot_be_rebuilt_comes_from_the_store_block_by_block():
    cluster = a_job()
    cluster.held |= {act.FetchSegment}
    action = reading(cluster)
    scrubbed(cluster, "c", action)
    cluster.tick(BLOCK_NBYTES / RATE + 1)
    action = take(cluster)["c"]
    assert action.block == 0, "the tail was first"
    scrubbed(cluster, "c", action, damage="block 0 does not match")
    assert take(cluster, act.FetchSegment)["c"].tier is Tier.REBUILT
    say(cluster, "c", ev.SegmentFetched(job=KEY, rank=2, save=ONE, tier=Tier.REBUILT, problem="no room"))
    copy = take(cluster, act.CopyBlock)["c"]
    assert (copy.name, copy.rank, copy.block) == (action.name, 2, 0)
    say(cluster, "c", ev.BlockCopied(job=KEY, name=copy.name, save=ONE))
    assert notes(cluster.nodes["c"])[0].endswith("no room; made good from the store")
    cluster.tick(BLOCK_NBYTES / RATE + 1)
    assert take(cluster)["c"].block == 1, "it goes on behind the block"


def test_a_job_without_a_set_has_the_store_alone():
    cluster = ACluster("a", scheme=Scheme.NONE, **ON)
    cluster.held = set(OURS)
    cluster.connect("a")
    cluster.stage(ONE)
    scrubbed(cluster, "a", reading(cluster, "a"))
    cluster.tick(10)
    scrubbed(cluster, "a", take(cluster)["a"], damage="block 0 does not match")
    copy = take(cluster, act.CopyBlock)["a"]
    say(cluster, "a", ev.BlockCopied(job=KEY, name=copy.name, save=ONE, problem="the store has other bytes"))
    assert notes(cluster.nodes["a"])[0].endswith("the store has other bytes; not made good")
    assert damaged(cluster) == [("a", Tier.ARENA, 0)]


def test_a_damaged_tail_that_nothing_has_is_said_until_its_save_is_released():
    cluster = ACluster("ab", scheme=Scheme.NONE, **ON)
    cluster.held = set(OURS)
    cluster.connect("ab")
    cluster.stage(ONE)
    action = reading(cluster, "b")
    assert action.block == -1
    scrubbed(cluster, "b", action, damage="leaves do not match")
    assert damaged(cluster) == damaged(cluster, "b") == [("b", Tier.ARENA, 1)]
    assert [entry.mended for entry in records(cluster)] == [""]
    assert take(cluster, act.CopyBlock) == {}
    cluster.stage(TWO)
    assert damaged(cluster) == damaged(cluster, "b") == []


def test_what_lasts_is_reported_once():
    cluster = ACluster("ab", scheme=Scheme.NONE, **ON)
    cluster.held = set(OURS)
    cluster.connect("ab")
    cluster.stage(ONE)
    for _ in range(3):
        scrubbed(cluster, "b", reading(cluster, "b"), damage="leaves do not match")
    assert len(notes(cluster.nodes["b"])) == len(records(cluster)) == 1


def test_a_store_that_stays_silent_is_left_alone_for_longer_each_time():
    """Whatever number of checkpoints there is: each read that hangs costs the worker a thread."""
    cluster = a_job(keep_last=9)
    for counter in range(2, 6):
        cluster.stage(SaveId(1, counter, 10 * counter, RUN))
    cluster.tick(DAY + 1)
    pauses = []
    for _ in range(4):
        asked = take(cluster, act.ScrubPiece)["a"]
        say(cluster, "a", ev.PieceScrubbed(job=KEY, save=asked.save, problem="late"))
        began = cluster.now
        while not any(isinstance(action, act.ScrubPiece) for _, action in cluster.waiting):
            cluster.tick(5)
        pauses.append(cluster.now - began)
    assert [60 * 2**n <= pause <= 60 * 2**n + 10 for n, pause in enumerate(pauses)] == [True] * 4


def test_what_is_found_sound_again_is_not_damaged_any_more():
    cluster = ACluster("ab", scheme=Scheme.NONE, **ON)
    cluster.held = set(OURS)
    cluster.connect("ab")
    cluster.stage(ONE)
    scrubbed(cluster, "b", reading(cluster, "b"), damage="leaves do not match")
    assert damaged(cluster, "b")
    scrubbed(cluster, "b", reading(cluster, "b"), last=True)
    assert damaged(cluster, "b") == []


@pytest.mark.parametrize("when", ["reading", "rebuilding", "copying"])
def test_a_save_that_is_released_meanwhile_is_no_finding(when):
    cluster = a_job()
    cluster.held |= {act.FetchSegment}
    scrubbed(cluster, "c", reading(cluster))
    cluster.tick(10)
    action = take(cluster)["c"]
    if when != "reading":
        scrubbed(cluster, "c", action, damage="block 0 does not match")
        fetched = ev.SegmentFetched(job=KEY, rank=2, save=ONE, tier=Tier.REBUILT, problem="broken off")
    if when == "copying":
        say(cluster, "c", fetched)
    cluster.stage(TWO)
    assert not any(slot.save == ONE for slot in cluster.nodes["c"].slots.values())
    if when == "reading":
        scrubbed(cluster, "c", action, damage="it was read while it was written")
    elif when == "rebuilding":
        say(cluster, "c", fetched)
    else:
        say(cluster, "c", ev.BlockCopied(job=KEY, name=action.name, save=ONE, problem="the slot is gone"))
    assert notes(cluster.nodes["c"]) == []
    assert records(cluster) == []
    cluster.tick(HOUR + 1)
    assert take(cluster)["c"].save == TWO, "and it goes on"


def test_a_block_that_the_executor_calls_gone_is_no_finding():
    cluster = a_job()
    action = reading(cluster)
    scrubbed(cluster, "c", action, gone=True, nbytes=0)
    assert notes(cluster.nodes["c"]) == []
    cluster.tick(10)
    parity = take(cluster)["c"]
    assert parity.name == ""
    scrubbed(cluster, "c", parity, last=True)
    cluster.tick(HOUR / 2)
    assert "c" not in take(cluster), "not again at once"


def parity_read(cluster: ACluster, name: str = "c") -> act.ScrubBlock:
    """The node comes to its parity."""
    action = reading(cluster, name)
    for _ in range(4):
        if not action.name:
            return action
        scrubbed(cluster, name, action, last=True)
        cluster.tick(BLOCK_NBYTES / RATE + 1)
        action = take(cluster)[name]
    raise AssertionError("no parity was read")


@pytest.mark.parametrize("fails", [False, True])
def test_damaged_parity_is_made_again_from_the_segments(fails):
    cluster = a_job()
    action = parity_read(cluster)
    assert action.epoch == 1
    cluster.failing = {"c"} if fails else set()
    scrubbed(cluster, "c", action, damage="parity does not match")
    assert (list(cluster.nodes["c"].chunks) == [(ONE, 1)]) is not fails
    (text,) = notes(cluster.nodes["c"])
    assert text.startswith("scrub: parity of step 10 is damaged in memory: parity does not match")
    assert text.endswith("not made good" if fails else "made good from the segments of its set")


# --- the store


def piece(cluster: ACluster, seconds: float = DAY + 1) -> act.ScrubPiece:
    """The coordinator's next one."""
    cluster.tick(seconds)
    return take(cluster, act.ScrubPiece)["a"]


def read(cluster: ACluster, **words) -> None:
    say(cluster, "a", ev.PieceScrubbed(job=KEY, save=ONE, **{"nbytes": BLOCK_NBYTES, **words}))


def mended(cluster: ACluster, name: str, order: act.Mend, **words) -> None:
    """The node's answer to the order."""
    say(cluster, name, ev.MendEnded(job=KEY, number=order.number, save=order.save, **words))


def harm(rank):
    return Harm(f"/store/job/x/r{rank}" if rank is not None else "/store/job/x/COMMITTED", "damaged", rank)


def test_the_coordinator_reads_what_was_committed_a_day_ago_piece_by_piece():
    cluster = a_job()
    cluster.tick(DAY - 10)
    assert take(cluster, act.ScrubPiece) == {}
    first = piece(cluster, 11)
    assert (first.save, first.place, first.nbytes) == (ONE, BEGIN, BLOCK_NBYTES)
    read(cluster, next=Place(3, 4))
    assert take(cluster, act.ScrubPiece) == {}, "the rate"
    assert piece(cluster, BLOCK_NBYTES / RATE + 1).place == Place(3, 4)
    read(cluster)
    assert piece(cluster).place == BEGIN, "a day later"
    assert not any(notes(node) for node in cluster.nodes.values())


def test_what_was_there_before_the_daemon_is_read_at_once():
    cluster = a_job()
    cluster.nodes["a"].restart()
    cluster.return_ranks("a")
    assert piece(cluster, 10).save == ONE


def test_damaged_images_are_written_again_where_they_lie_in_memory():
    cluster = a_job()
    piece(cluster)
    read(cluster, harms=(harm(0), harm(2)), next=Place(4, 0))
    orders = take(cluster, act.Mend)
    assert {name: (order.ranks, len(order.slots)) for name, order in orders.items()} == {"a": ((0,), 1), "c": ((2,), 1)}
    mended(cluster, "a", orders["a"], memory=(0,))
    assert len(notes(cluster.nodes["a"])) == 1
    mended(cluster, "c", orders["c"], lost=(2,), problem="its copy is damaged, too")
    told = notes(cluster.nodes["a"])
    assert told[0] == (
        "scrub: rank 0 of step 10 is damaged on the store: /store/job/x/r0: damaged; made good from memory"
    )
    assert told[1].endswith("damaged; its copy is damaged, too; not made good")
    assert damaged(cluster) == [("a", Tier.PFS, 2)]
    assert {entry.rank: entry.mended for entry in records(cluster)} == {0: "memory", 2: ""}
    assert piece(cluster, 60).place == Place(4, 0)


def test_an_image_that_no_node_has_is_mended_from_parity_by_the_coordinator():
    cluster = a_job()
    cluster.stage(TWO)
    assert not any(slot.save == ONE for node in cluster.nodes.values() for slot in node.slots.values())
    cluster.tick(DAY + 1)
    for _ in range(9):
        if take(cluster, act.ScrubPiece)["a"].save == ONE:
            break
        say(cluster, "a", ev.PieceScrubbed(job=KEY, save=TWO, nbytes=1))
        cluster.tick(10)
    read(cluster, harms=(harm(2),))
    order = take(cluster, act.Mend)["a"]
    assert (order.save, order.ranks, order.slots) == (ONE, (2,), ())
    mended(cluster, "a", order, parity=(2,))
    assert notes(cluster.nodes["a"])[0].endswith("made good from parity on the store")


def test_what_is_no_image_is_said_and_left():
    cluster = a_job()
    piece(cluster)
    read(cluster, harms=(harm(None),))
    assert take(cluster, act.Mend) == {}
    assert damaged(cluster) == [("a", Tier.PFS, None)]


def test_what_is_not_made_good_within_an_hour_is_said_and_no_second_order_is_given():
    cluster = a_job()
    piece(cluster)
    read(cluster, harms=(harm(2),), next=Place(4, 0))
    order = take(cluster, act.Mend)["c"]
    for _ in range(8):
        cluster.tick(HOUR + 10)
        assert take(cluster, act.Mend) == take(cluster, act.ScrubPiece) == {}
    assert damaged(cluster) == [("a", Tier.PFS, 2)]
    assert len(records(cluster)) == 1
    mended(cluster, "c", order, memory=(2,))
    assert damaged(cluster) == []
    assert [entry.mended for entry in records(cluster)] == ["", "memory"]
    found = cluster.nodes["a"].job.scrub.findings
    assert (found.found, found.mended) == (1, 1)
    assert piece(cluster, 60).place == Place(4, 0)


def test_an_order_whose_answer_was_lost_is_given_again():
    cluster = a_job()
    piece(cluster)
    read(cluster, harms=(harm(2),))
    first = take(cluster, act.Mend)["c"]
    cluster.nodes["c"].job.scrub._mending = None  # it has answered
    cluster.tick(HOUR + 10)
    assert take(cluster, act.Mend) == {"c": first}


def test_a_node_that_is_lost_is_not_waited_for():
    cluster = a_job()
    piece(cluster)
    read(cluster, harms=(harm(0), harm(2)))
    orders = take(cluster, act.Mend)
    say(cluster, "a", ev.PeerDown(job=KEY, node="c"))
    assert damaged(cluster) == [("a", Tier.PFS, 2)]
    assert "node c was to write it again, and is lost" in records(cluster)[0].what
    mended(cluster, "a", orders["a"], memory=(0,))
    assert piece(cluster).place == BEGIN, "and all of it again, a day later"


@pytest.mark.parametrize("restarted", [False, True])
def test_the_answer_to_an_earlier_order_is_not_taken_for_another_ones(restarted):
    cluster = a_job()
    piece(cluster)
    read(cluster, harms=(harm(2),), next=Place(4, 0))
    first = take(cluster, act.Mend)["c"]
    say(cluster, "a", ev.PeerDown(job=KEY, node="c"))
    say(cluster, "a", ev.PeerUp(job=KEY, node="c", fresh=False))
    if restarted:  # it knows of no order
        cluster.nodes["c"].job.scrub._mending = None
    piece(cluster, 60)
    read(cluster, harms=(harm(2)._replace(what="another file"),), next=Place(4, 9))
    second = take(cluster, act.Mend)
    assert list(second) == (["c"] if restarted else []), "one at a time"
    mended(cluster, "c", first, memory=(2,))
    assert damaged(cluster) == [("a", Tier.PFS, 2)]
    assert [entry.mended for entry in records(cluster)] == [""]
    if restarted:
        mended(cluster, "c", second["c"], memory=(2,))
        assert damaged(cluster) == []
    assert piece(cluster, 60).place == Place(4, 9)


def test_what_was_sound_when_it_was_read_again_was_not_made_good():
    cluster = a_job()
    piece(cluster)
    read(cluster, harms=(harm(2),))
    mended(cluster, "c", take(cluster, act.Mend)["c"])
    assert damaged(cluster) == records(cluster) == []
    assert notes(cluster.nodes["a"]) == [
        "scrub: /store/job/x/r2: damaged; sound when it was read again: nothing was written"
    ]
    assert cluster.nodes["a"].job.scrub.findings.mended == 0


@pytest.mark.parametrize("words", [{"problem": "EIO"}, {"gone": True, "harms": (harm(2),)}])
def test_a_store_that_is_silent_or_a_checkpoint_that_is_removed_is_no_finding(words):
    cluster = a_job()
    first = piece(cluster)
    read(cluster, nbytes=0, **words)
    assert not any(notes(node) for node in cluster.nodes.values())
    assert records(cluster) == []
    cluster.tick(DAY / 2)
    assert take(cluster, act.ScrubPiece) == {}
    assert piece(cluster, DAY / 2 + 1) == first


def test_an_order_of_a_node_that_does_not_coordinate_is_nothing():
    cluster = a_job()
    order = ev.MendOrdered(job=KEY, node="b", number=1, save=ONE, ranks=(2,))
    say(cluster, "c", order)
    assert take(cluster, act.Mend) == {}
    say(cluster, "c", replace(order, node="a"))
    assert list(take(cluster, act.Mend)) == ["c"]


def test_what_is_off_reads_nothing():
    cluster = a_job(scrub_memory=0, scrub_store=0)
    cluster.tick(2 * DAY)
    assert take(cluster) == take(cluster, act.ScrubPiece) == {}
    assert all(node.job.scrub.due is None for node in cluster.nodes.values())
