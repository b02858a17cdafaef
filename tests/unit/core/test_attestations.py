"""What replicas attest of their slices: when those make a whole, and what becomes of a save when it is none."""

import msgspec
import pytest

from ckptd.core import events as ev
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.rank_members import members_of
from ckptd.shared.format.replica_attestations import (
    NOT_COMPARED,
    ON_DEVICES,
    WHOLE,
    Attestation,
    Compared,
    Where,
    as_recorded,
    compared,
    difference,
    difference_of,
    doubt,
)
from ckptd.shared.protocol.messages import Cadence, LoadFrom, Progress
from tests.runs import RUN
from tests.unit.core.a_job import KEY, AJob

ONE, TWO = SaveId(1, 1, 10, RUN), SaveId(1, 2, 20, RUN)


def attestation(ranks=(0, 1), cut=b"c" * 8, content=b"w" + b"x" * 7):
    return Attestation(members_of(ranks), cut, content)


def test_no_shares_are_a_whole():
    assert not difference({0: (), 1: ()})


def test_replicas_that_say_the_same_are_a_whole():
    assert not difference({0: (attestation(),), 1: (attestation(),), 2: ()})


def test_sets_of_replicas_are_judged_separately():
    other = attestation((2, 3), cut=b"d" * 8)
    assert not difference({0: (attestation(),), 1: (attestation(),), 2: (other,), 3: (other,)})


def test_all_who_looked_at_the_same_are_compared_although_some_looked_elsewhere():
    elsewhere, seen, other = (
        attestation(range(3), content=b"f" * 8),
        attestation(range(3)),
        attestation(range(3), content=b"w" + b"y" * 7),
    )
    assert not difference({0: (elsewhere,), 1: (seen,), 2: (seen,)})
    assert "ranks 1 and 2 are no replicas" in difference({0: (elsewhere,), 1: (seen,), 2: (other,)})


@pytest.mark.parametrize(
    ("second", "why"),
    [
        ((attestation(cut=b"d" * 8),), "different tensors"),
        ((attestation(content=b"w" + b"y" * 7),), "no replicas"),
        ((), "only 1 saved a slice"),
        ((attestation((1, 2)),), "only 1 saved a slice"),
    ],
)
def test_what_is_no_whole_is_reported_with_the_ranks(second, why):
    assert why in difference({0: (attestation(),), 1: second})


def test_ranks_that_looked_at_different_bytes_are_not_compared():
    assert not difference({0: (attestation(),), 1: (attestation(content=b"p" + b"z" * 7),)})


@pytest.mark.parametrize(
    ("said_by", "why"),
    [
        ((0, 1, 3, 5), ""),
        ((0, 3), "of 3 replicas only 2 saved a slice, rank 0 among them"),
        ((0, 3, 4), "rank 4 saved a slice of what it does not hold with the others"),
        ((0, 3, 4, 5), "rank 4 saved a slice"),
    ],
)
def test_all_members_of_a_set_and_no_other_rank_must_share(said_by, why):
    """Two stages of a pipeline, of three and of two ranks; and a rank of none."""
    uneven, other = attestation((0, 3, 5)), attestation((1, 2), cut=b"d" * 8)
    said = dict.fromkeys(said_by, (uneven,))
    if not why:
        said = {0: (uneven,), 1: (other,), 2: (other,), 3: (uneven,), 4: (), 5: (uneven,)}
    found = difference(said)
    assert (found == "") is (why == "")
    assert found.startswith(why)


def test_members_that_no_job_has_are_refused():
    with pytest.raises(ValueError, match="ranks"):
        Attestation(b"\0\1\1\1", b"c" * 8, b"w" * 8)


def whole(content=b"x" * 7, parts=b"", **words):
    """The word of a rank that looked at all bytes."""
    return msgspec.structs.replace(attestation(content=WHOLE + content, **words), parts=parts)


def told(content=b"x" * 7, **words):
    """The word of a rank that saved all of its own."""
    return msgspec.structs.replace(whole(content, **words), only_told=True)


def test_what_differs_is_reported_by_the_parts_in_which_it_does():
    ours, theirs = b"aaaabbbbccccdddd", b"aaaaBBBBccccDDDD"
    found = difference_of({0: (whole(parts=ours),), 1: (whole(b"y" * 7, parts=theirs),)})
    assert found is not None
    assert found.where == Where(members_of((0, 1)), (1, 3))
    found = difference_of({0: (whole(parts=ours),), 1: (whole(b"y" * 7, parts=theirs[:4]),)})
    assert found is not None
    assert found.where is None


ON_A_DEVICE = bytes([ON_DEVICES | 3]) + b"x" * 7


@pytest.mark.parametrize(
    ("said", "how_much"),
    [
        ({0: (), 1: ()}, Compared.NO_REPLICAS),
        ({0: (whole(),), 1: (whole(),)}, Compared.ALL),
        ({0: (whole(),), 1: (whole(),), 2: ()}, Compared.ALL),
        ({0: (attestation(content=ON_A_DEVICE),), 1: (attestation(content=ON_A_DEVICE),)}, Compared.ALL),
        ({0: (attestation(content=ON_A_DEVICE),), 1: (whole(),)}, Compared.WINDOW),
        ({0: (whole(),), 1: (attestation(),)}, Compared.WINDOW),
        ({0: (attestation(),), 1: (attestation(),)}, Compared.WINDOW),
        ({0: (whole(),), 1: ()}, Compared.WINDOW),
        ({0: (whole(ranks=range(3)),), 1: (whole(ranks=range(3)),)}, Compared.WINDOW),
        ({0: (whole(), attestation((0, 2))), 1: (whole(),), 2: (attestation((0, 2)),)}, Compared.WINDOW),
        ({0: (told(),), 1: (told(),)}, Compared.ALL),
        ({0: (told(),), 1: (told(b"y" * 7),)}, Compared.DIFFERING),
        ({0: (told(),), 1: (told(cut=b"d" * 8),)}, Compared.DIFFERING),
        ({0: (told(),), 1: (told(), NOT_COMPARED)}, Compared.WINDOW),
        ({0: (NOT_COMPARED,), 1: (NOT_COMPARED,)}, Compared.WINDOW),
        (
            {0: (told(ranks=range(3)),), 1: (told(b"y" * 7, ranks=range(3)),), 2: (attestation(range(3)),)},
            Compared.DIFFERING,
        ),
    ],
)
def test_all_was_compared_when_every_replica_looked_at_all_of_it(said, how_much):
    assert compared(said) is how_much
    assert bool(doubt(how_much)) == (how_much in {Compared.WINDOW, Compared.DIFFERING})


def test_what_is_only_reported_ends_no_save():
    assert not difference({0: (told(),), 1: (told(b"y" * 7),)})
    assert not difference({0: (told(),), 1: (told(cut=b"d" * 8),)})
    assert not difference({0: (told(),), 1: ()})


@pytest.mark.parametrize("complete", [True, False])
def test_a_share_beside_an_image_that_has_all_is_no_whole(complete):
    found = difference_of({0: (told(),), 1: (whole(),)}, complete=complete)
    assert found is not None
    assert found.reason == "rank 1 saved a slice of what rank 0 saved all of"


def test_an_unknown_word_of_a_later_release_is_in_doubt():
    assert doubt("sampled")


def test_the_store_gets_what_was_compared_and_not_what_names_a_difference():
    assert as_recorded((whole(parts=b"abcd"),)) == (whole(),)


def stage(job, rank, save, attestations):
    job.say(
        ev.SegmentStaged(
            job=KEY, request=job.request(), rank=rank, session="a", world_size=2, slot=job.idle(rank), save=save,
            nbytes=10, attestations=attestations,
        )
    )  # fmt: skip


def ends(job, save, rank):
    return [m for m in job.told(rank) if isinstance(m, Progress) and m.save == save and m.end]


def test_a_save_whose_slices_make_no_whole_ends_abandoned_on_all_ranks_and_all_have_to_save_their_own():
    job = AJob(world=2).start()
    stage(job, 0, ONE, (attestation(),))
    stage(job, 1, ONE, (attestation(cut=b"d" * 8),))
    for rank in (0, 1):
        (end,) = ends(job, ONE, rank)
        assert (str(end.end), end.mismatched, end.milestone) == ("abandoned", True, None)
        assert "different tensors" in end.reason
    assert job.node.slots.holding(ONE) == []
    job.stage_all(TWO)
    assert [str(m.milestone) for m in job.told(0) if isinstance(m, Progress) and m.save == TWO][:1] == ["staged"]


def test_ranks_learn_in_which_parts_they_differ():
    job = AJob(world=2).start()
    stage(job, 0, ONE, (whole(parts=b"aaaabbbb"),))
    stage(job, 1, ONE, (whole(b"y" * 7, parts=b"aaaacccc"),))
    for rank in (0, 1):
        (end,) = ends(job, ONE, rank)
        assert end.where == Where(members_of((0, 1)), (1,))


def staged(job, save, *, of=whole):
    for rank in (0, 1):
        stage(job, rank, save, (of(),))


def test_one_that_was_asked_for_is_drained_whatever_was_compared_and_its_record_says_so():
    job = AJob(world=2, cadence=Cadence(10)).start()
    staged(job, ONE)
    job.drain(ONE)
    staged(job, SaveId(1, 2, 15, RUN), of=attestation)
    job.say(ev.DrainAsked(job=KEY))
    job.drain(SaveId(1, 2, 15, RUN))
    assert job.facts.on_store[SaveId(1, 2, 15, RUN)].compared == "window"
    assert "step 15: its ranks saved what they all hold" in job.facts.notes_of(SaveId(1, 2, 15, RUN))[0]
    assert job.facts.notes_of(ONE) == ()


def test_one_of_replicas_that_saved_all_of_their_own_is_staged_and_marked():
    job = AJob(world=2).start()
    stage(job, 0, ONE, (told(),))
    stage(job, 1, ONE, (told(b"y" * 7),))
    job.drain(ONE)
    assert job.facts.on_store[ONE].compared == "differing"
    assert job.facts.notes_of(ONE) == ("step 10: its replicas differed when it was saved",)
    assert not job.facts.records[ONE].shared


def test_a_daemon_that_restarted_finds_out_too():
    job = AJob(world=2)
    for rank, said in ((0, attestation()), (1, attestation(content=b"w" + b"z" * 7))):
        name = f"r{rank:05d}-000001.slot"
        found = ev.SlotAdopted(
            job=KEY, rank=rank, slot=name, capacity=4096, world_size=2, save=ONE, nbytes=10, attestations=(said,)
        )
        job.say(found)
    job.start()
    job.ask_load(0)
    job.ask_load(1)
    assert all(getattr(m, "save", None) != ONE or m.mismatched for rank in (0, 1) for m in job.told(rank))


def test_a_load_of_shares_has_all_of_them_read_at_once():
    """Not first each rank's own, which is known not to be enough."""
    job = AJob(world=2).start()
    for rank in (0, 1):
        stage(job, rank, ONE, (attestation(),))
    job.drain(ONE)
    for rank in (0, 1):
        job.ask_load(rank)
    job.number(2)
    job.scan(ONE)
    orders = [m for rank in (0, 1) for m in job.told(rank) if isinstance(m, LoadFrom)]
    assert orders
    assert all(order.whole and order.save == ONE for order in orders)
