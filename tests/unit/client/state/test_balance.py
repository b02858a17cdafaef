"""Slices of replicated tensors: each byte is one replica's, and all replicas have equally many."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.packed_layout import decode_layout
from ckptd.shared.format.rank_members import MAX_MEMBERS_NBYTES, members_of
from ckptd.shared.format.replica_attestations import NOT_COMPARED, PART_NBYTES, Where
from ckptd.shared.protocol.messages import Cadence, Milestone
from ckptd_client import ConfigError
from ckptd_client._daemon.settings import verification
from ckptd_client._image.plan import gather, make_plan
from ckptd_client._local.rank import Group
from ckptd_client._state import replica_digests, replica_slices, replicas
from ckptd_client._state.replica_choice import held_alike, of_the_lowest
from ckptd_client._state.replica_slices import WINDOWS, attestation_of_digests, digests_of, streams_of
from ckptd_client._state.sampling import Sample, Sampling, Verify, listed
from ckptd_client._state.tree import flatten
from tests.runs import RUN


def stream(shapes, ranks, dtype=torch.float32):
    state = {f"t{i}": torch.empty(shape, dtype=dtype, device="meta") for i, shape in enumerate(shapes)}
    flat = flatten(state, lambda value: isinstance(value, torch.Tensor))
    return streams_of(dict.fromkeys(range(len(shapes)), tuple(range(ranks))), flat, skipped=set())


def nbytes_of(part, shapes, itemsize=4):
    total = 0
    for position, rows in part.items():
        shape = shapes[position]
        whole = math.prod(shape) * itemsize
        total += whole if not shape else whole // shape[rows.dim] * (rows.stop - rows.first)
    return total


shape = st.lists(st.integers(1, 7), max_size=3).map(tuple)


@given(shapes=st.lists(shape, min_size=1, max_size=8), ranks=st.integers(2, 9))
def test_every_row_is_one_replicas(shapes, ranks):
    (found,) = stream(shapes, ranks)
    for position, size in enumerate(shapes):
        rows = []
        for rank in range(ranks):
            mine = found.slice_of(rank).get(position)
            if mine is not None:
                assert all(size[d] == 1 for d in range(mine.dim))
                rows += range(mine.first, mine.stop)
        dim = next((d for d, n in enumerate(size) if n > 1), 0)
        assert rows == list(range(size[dim] if size else 1))


@given(shapes=st.lists(shape, min_size=1, max_size=8))
def test_windows_cover_the_stream_once(shapes):
    (found,) = stream(shapes, 2)
    seen = []
    for window in range(WINDOWS):
        bounds = window * found.nbytes // WINDOWS, (window + 1) * found.nbytes // WINDOWS
        seen += [(p, row) for p, rows in found.between(*bounds) for row in range(rows.first, rows.stop)]
    assert len(seen) == len(set(seen))
    assert sorted(seen) == sorted(
        (p, row) for p, rows in found.between(0, found.nbytes) for row in range(rows.first, rows.stop)
    )


def gpt2():
    block = [(768,), (768,), (2304, 768), (2304,), (768, 768), (768,), (768,), (768,)]
    block += [(3072, 768), (3072,), (768, 3072), (768,)]
    return [(50257, 768), (1024, 768), *block * 12, (768,), (768,)]


def llama():
    block = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
    return [(128256, 4096), *[s for _ in range(32) for s in (*block, (4096,), (4096,))], (4096,), (128256, 4096)]


@pytest.mark.parametrize("ranks", [4, 8, 64])
@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize("model", [gpt2, llama])
def test_slices_are_equal_to_one_in_a_hundred(model, ranks, adam):
    shapes = [s for s in model() for _ in range(3 if adam else 1)]
    (found,) = stream(shapes, ranks)
    slices = [nbytes_of(found.slice_of(rank), shapes) for rank in range(ranks)]
    assert sum(slices) == found.nbytes
    assert max(slices) / (sum(slices) / ranks) <= 1.01


def plan(state, rank, world_size=3, replicated=("*",)):
    return make_plan(state, rank=rank, world_size=world_size, replicated=replicated)


def test_tied_tensors_are_saved_once_and_named_by_the_rank_that_has_a_part():
    weight = torch.arange(30.0).view(10, 3)
    state = {"a": weight, "b": weight, "c": torch.arange(4)}
    names = [[box.name for box in plan(state, rank).image.boxes] for rank in range(3)]
    assert not any("b" in one for one in names)
    assert sum(box.sizes[0] for rank in range(3) for box in plan(state, rank).image.boxes if box.name == "a") == 10


def test_what_cannot_be_cut_and_what_is_not_named_is_everybodys_own():
    packed = torch.zeros(4, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    state = {"packed": packed, "none": torch.empty(0, 3), "mine": torch.ones(4), "ours": torch.ones(600)}
    for rank in range(3):
        names = {box.name for box in plan(state, rank, replicated=("ours", "packed", "none")).image.boxes}
        assert {"packed", "none", "mine"} <= names


@pytest.mark.parametrize("balanced", [True, False])
def test_what_no_stream_has_is_said_to_be_compared_by_none(balanced):
    packed = torch.zeros(4, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    both = {"packed": packed, "ours": torch.ones(600)}
    said = {}
    for name, state in (("both", both), ("ours", {"ours": both["ours"], "tied": both["ours"]})):
        made = make_plan(state, rank=0, world_size=2, replicated=("*",), balanced=balanced)
        values = gather(made, state, sample=Sample(whole=True))
        assert values is not None
        said[name] = values.plain.attestations
    (ours,) = said["ours"]
    assert said["both"][-1] == NOT_COMPARED
    assert [attestation.of_all_bytes for attestation in said["both"]] == [True, False]
    assert ours.only_told is not balanced


def test_a_rank_that_saves_all_of_its_own_says_what_others_hold_too():
    state = {"ours": torch.ones(600), "tied": torch.ones(0), "mine": torch.ones(3)}
    state["tied"] = state["ours"]
    made = make_plan(state, rank=1, world_size=2, replicated=("ours", "tied"), balanced=False)
    layout = decode_layout(made.layout, where="here")
    assert layout.held_alike == {"": ["ours"]}
    assert [entry.sizes for entry in layout.tensors if entry.name == "ours"] == [(600,)]
    assert held_alike([layout], 2) == {"ours": "", "tied": ""}
    assert of_the_lowest(held_alike([layout], 2), state, 2) == set()
    assert of_the_lowest(held_alike([layout], 3), state, 3) == {"ours", "tied"}
    shared = make_plan(state, rank=1, world_size=2, replicated=("ours", "tied"))
    assert decode_layout(shared.layout, where="here").held_alike == {}


def test_a_lone_rank_saves_everything():
    state = {"w": torch.ones(5)}
    assert not plan(state, 0, world_size=1).streams
    assert not make_plan(state, rank=0, world_size=2).streams


@pytest.mark.parametrize("wrong", ["model.*", 3, [""], [1]])
def test_patterns_that_are_none_are_reported(join, wrong):
    with pytest.raises(ConfigError, match="replicated"):
        join(replicated=wrong)


@pytest.mark.parametrize("wrong", ["row", "", 1])
def test_a_balance_that_is_none_is_reported(join, wrong):
    with pytest.raises(ConfigError, match="balance"):
        join(balance=wrong)


class Handle:
    """Of a save of which nothing was heard, or that it was staged."""

    def __init__(self, counter, step=None, *, staged=False):
        self.save_id = a_save(counter, step)
        self.step = self.save_id.step
        self.known_milestone = {"": None, False: None, "durable": Milestone.DURABLE}.get(staged, Milestone.STAGED)
        self.ended = self.in_vain = False


def a_save(counter, step=None):
    return SaveId(1, counter, counter if step is None else step, RUN)


def test_a_look_counts_only_when_its_save_was_staged():
    (one,) = stream([(4, 4)], 2)
    sampling, skipped, staged = Sampling(), Handle(1), Handle(2)
    assert one.cut not in sampling.next(a_save(1)).checked
    sampling.record([one], Sample(1), skipped)
    assert one.cut not in sampling.next(a_save(2)).checked
    sampling.record([one], Sample(2), staged)
    staged.known_milestone = "staged"
    assert one.cut in sampling.next(a_save(3)).checked


def test_a_large_stream_is_looked_at_in_parts(monkeypatch):
    monkeypatch.setattr(replica_slices, "_SAMPLE_NBYTES", 20)
    (one,) = stream([(4, 4)], 2)
    assert one.parts == 4
    sampling = Sampling()
    for turn in (1, 2, 2, 3):
        assert one.cut not in sampling.next(a_save(turn)).checked
        sampling.record([one], Sample(turn), Handle(turn, staged=True))
    assert one.cut not in sampling.next(a_save(4)).checked
    sampling.record([one], Sample(4), Handle(4, staged=True))
    assert one.cut in sampling.next(a_save(5)).checked


def test_one_look_at_all_of_it_is_enough(monkeypatch):
    monkeypatch.setattr(replica_slices, "_SAMPLE_NBYTES", 20)
    (one,) = stream([(4, 4)], 2)
    sampling = Sampling()
    sampling.record([one], Sample(1, whole=True), Handle(1, staged=True))
    assert one.cut in sampling.next(a_save(2)).checked


# --- in which saves all of it is compared


def wholes(sampling, steps, *, hears="durable", fails=(), drained=(), first=1):
    """Steps of which all is compared. hears: what is known of one when the next begins."""
    found = []
    for counter, step in enumerate(steps, start=first):
        sample = sampling.next(a_save(counter, step), drain=step in drained)
        sampling.record([], sample, Handle(counter, step, staged=hears if step not in fails else ""))
        found += [step] if sample.whole else []
    return found


def test_each_save_is_compared_in_full_where_each_is_drained():
    assert wholes(Sampling(Verify(), Cadence(1)), range(5)) == [0, 1, 2, 3, 4]


def test_where_some_are_drained_those_are_compared_in_full():
    assert wholes(Sampling(Verify(), Cadence(10)), range(3, 40, 3)) == [3, 12, 21, 30]


def test_a_save_that_failed_leaves_the_next_one_due():
    assert wholes(Sampling(Verify(), Cadence(10)), range(3, 40, 3), fails=(12, 15)) == [3, 12, 15, 18, 21, 30]


def test_who_has_not_received_that_a_save_was_staged_compares_more_and_not_less():
    assert wholes(Sampling(Verify(), Cadence(10)), range(0, 40, 3), hears="") == list(range(0, 40, 3))


def test_while_a_drain_is_late_any_save_may_take_its_turn():
    sampling = Sampling(Verify(), Cadence(10))
    assert wholes(sampling, range(10), hears="staged") == list(range(10))
    assert wholes(sampling, range(10, 30), first=11) == [10, 20]


def test_a_store_that_is_away_for_ever_keeps_no_more_than_some_saves_in_mind():
    sampling = Sampling(Verify(), Cadence(1000))
    assert wholes(sampling, range(200), hears="staged") == list(range(200))
    assert len(sampling._not_durable) < 70
    assert wholes(sampling, range(200, 300), first=201) == [200]


def test_a_save_that_is_to_be_drained_is_compared_in_full_and_is_not_the_one_that_was_due():
    assert wholes(Sampling(Verify(), Cadence(10)), range(5, 40, 5), drained=(15, 20)) == [5, 10, 15, 20, 25, 30]


def test_with_a_cadence_of_seconds_each_save_may_be_drained():
    assert wholes(Sampling(Verify(), Cadence(0, 30.0)), range(4)) == [0, 1, 2, 3]


def test_one_of_so_many_saves_is_compared_in_full_whatever_is_drained():
    assert wholes(Sampling(verification(3), Cadence(1)), range(8), drained=(4,)) == [0, 3, 6]
    assert wholes(Sampling(verification("off"), Cadence(1)), range(8), drained=(4,)) == []


@pytest.mark.parametrize("wrong", ["always", 0, -1, True, None, 1.5])
def test_a_verification_that_is_none_is_reported(join, wrong):
    with pytest.raises(ConfigError, match="verify_replicas"):
        join(verify_replicas=wrong)


# --- the digests


def whole_shares(state, rank=0):
    flat = flatten(state, lambda value: isinstance(value, torch.Tensor))
    streams = streams_of(dict.fromkeys(range(len(flat.values)), (0, 1)), flat, skipped=set())
    return streams, attestation_of_digests(streams, digests_of(streams, flat.values))()


def some(count=100):
    torch.manual_seed(1)
    odd = {"half": torch.randn(33).to(torch.bfloat16), "bits": torch.randn(77) > 0, "turned": torch.randn(40, 30).t()}
    return odd | {f"t{i}": torch.randn(7, i % 5 + 1) for i in range(count)} | {"one": torch.tensor(3.5)}


@pytest.mark.parametrize("name", ["half", "bits", "turned", "t0", "t50", "t99", "one"])
def test_one_element_that_differs_is_found_and_its_tensor_named(name):
    ours, theirs = some(), some()
    last = (-1,) * theirs[name].dim()
    theirs[name][last] = not theirs[name][last] if name == "bits" else theirs[name][last] + 1
    (stream,), (mine,) = whole_shares(ours)
    _, (others,) = whole_shares(theirs)
    assert mine.content != others.content
    differing = [
        i for i in range(32) if mine.parts[4 * i : 4 * i + PART_NBYTES] != others.parts[4 * i : 4 * i + PART_NBYTES]
    ]
    named = stream.names_in(differing, [stream])
    assert name in named
    assert len(differing) == 1
    assert len(named) <= 4


def test_few_tensors_are_named_each_by_itself():
    (found,) = stream([(4,)] * 5, 2)
    assert [found.names_in([i], [found]) for i in range(5)] == [[f"t{i}"] for i in range(5)]
    assert found.names_in([7], [found]) == []


def test_the_digest_does_not_depend_on_how_many_threads_make_it(monkeypatch):
    state = {"a": torch.randn(70_001), "b": torch.randn(300, 300).t()}
    monkeypatch.setattr(replica_digests, "BLOCK_NBYTES", 4000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    _, alone = whole_shares(state)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(replica_digests, "_THREADED_NBYTES", 0)
    assert whole_shares(state)[1] == alone


def test_keys_are_named_for_the_save_in_which_they_differ():
    one, other = stream([(4,)] * 3, 2), stream([(5,)] * 2, 2)
    sampling = Sampling()
    sampling.record(one, Sample(1, whole=True), Handle(1))
    sampling.record(other, Sample(2, whole=True), Handle(2))
    assert sampling.names(a_save(1), Where(one[0].members, (0, 2))) == ["t0", "t2"]
    assert sampling.names(a_save(3), Where(one[0].members, (0, 2))) == []
    assert listed([f"k{i}" for i in range(10)]).endswith("k7, ... (10 in all)")


def test_a_rank_that_is_not_torchs_takes_no_mesh_or_process_group_for_replicas(lone_group):
    net = DistributedDataParallel(nn.Linear(4, 4))
    assert not make_plan({"net": net}, rank=2, world_size=4, replicated=()).streams


def test_parameters_that_ddp_does_not_sum_are_everybodys_own(lone_group, monkeypatch):
    """A group of one has no replicas; so the group is said to be of two."""
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda _: [0, 1])
    monkeypatch.setattr(replicas, "_numbers_agree", lambda _: True)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].requires_grad_(False)
    state = {"net": DistributedDataParallel(net)}
    first = make_plan(state, rank=0, world_size=2, replicated=())
    assert sum(len(one.positions) for one in first.streams) == 4  # the frozen ones are as they were sent around
    assert gather(first, state) is not None
    net[1].requires_grad_(True)
    assert gather(first, state) is None
    assert not make_plan(state, rank=0, world_size=2, replicated=()).streams


# --- a part of the job


def of_groups(monkeypatch, groups):
    """The DDP modules of a test are said to be of these ranks, in the order in which they were made."""
    numbers = {}
    monkeypatch.setattr(replicas, "_numbers_agree", lambda _: True)
    monkeypatch.setattr(replicas, "_ranks_of", lambda module: numbers.setdefault(id(module), groups[len(numbers)]))


def found_in(state, rank=3, world_size=6, **options):
    flat = flatten(state, lambda value: isinstance(value, torch.Tensor))
    found = replicas.replicas_of(flat, (), Group(rank, world_size, ""), options.get("is_own", lambda _: False))
    return {flat.names[i]: (ranks, found.holders.get(i)) for i, ranks in found.ranks.items()}


def test_parameters_of_a_ddp_over_a_subgroup_and_their_optimizers_state_are_that_groups(lone_group, monkeypatch):
    of_groups(monkeypatch, [(1, 3, 4)])
    net = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    found = found_in({"net": net, "optimizer": optimizer, "own": torch.ones(3)})
    assert len(found) == 2 + 6
    assert set(found.values()) == {((1, 3, 4), members_of((1, 3, 4)))}


def test_an_optimizer_of_parameters_of_two_groups_is_the_ranks_own(lone_group, monkeypatch):
    of_groups(monkeypatch, [(1, 3), (3, 5)])
    nets = [DistributedDataParallel(nn.Linear(4, 4)) for _ in range(2)]
    optimizer = torch.optim.SGD([p for net in nets for p in net.parameters()], momentum=0.9)
    for net in nets:
        net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    found = found_in({"a": nets[0], "b": nets[1], "optimizer": optimizer})
    assert {name.partition(".")[0]: ranks for name, (ranks, _) in found.items()} == {"a": (1, 3), "b": (3, 5)}


def test_what_is_each_ranks_own_has_no_holders(lone_group, monkeypatch):
    of_groups(monkeypatch, [(1, 3)])
    net = DistributedDataParallel(nn.Linear(4, 4))
    assert list(found_in({"net": net}, is_own=lambda name: name.endswith("bias"))) == ["net.module.weight"]


def test_all_ranks_are_no_part(lone_group, monkeypatch):
    of_groups(monkeypatch, [tuple(range(6))])
    assert {held for _, held in found_in({"net": DistributedDataParallel(nn.Linear(4, 4))}).values()} == {None}


def test_sets_that_a_seal_has_no_room_for_have_no_stream():
    """Two large ones without any order: the first fits, the second does not, a small one does."""
    large = [tuple(sorted({number * number * k % 79_999 for number in range(1, 220)})) for k in (7, 11)]
    pair = (79_998, 79_999)
    sets = sorted([*large, pair])
    assert replica_slices.fitting(sets) == [sets[0], pair]
    assert sum(len(members_of(ranks)) for ranks in replica_slices.fitting(sets)) <= MAX_MEMBERS_NBYTES
