"""What plain leaves become for torch's own readers, and that unchanged ones cost nothing."""

import dataclasses
import io
import logging

import pytest
import torch

from ckptd.shared.base.errors import DamagedError
from ckptd.shared.format.manifest import StockObjects, decode_objects, encode_objects
from ckptd.shared.format.packed_layout import decode_layout
from ckptd_client._image import stock_objects
from ckptd_client._image.plan import gather, make_plan
from ckptd_client._image.stock_objects import StockLeaves
from ckptd_client._state.leaves import _class_of, _tag_of, encode_leaf, register
from tests.unit.client.same import difference
from tests.unit.client.test_round_trip import generators, plain


def leaves_of(values):
    return {name: encode_leaf(value, name) for name, value in values.items()}


def loaded(encoded):
    """What torch.load makes of each leaf."""
    objects = decode_objects(encoded, where="here")
    archives = {name: objects.data[start : start + nbytes] for name, (start, nbytes) in objects.index.items()}
    assert sum(map(len, archives.values())) == len(objects.data)
    return {name: torch.load(io.BytesIO(data), weights_only=False) for name, data in archives.items()}


@pytest.fixture
def made(monkeypatch):
    """The values that were given to torch.save."""
    values, real = [], torch.save
    monkeypatch.setattr(stock_objects.torch, "save", lambda value, file: (values.append(value), real(value, file)))
    return values


@pytest.mark.parametrize("make", [plain, generators])
def test_torch_loads_what_was_saved(make):
    values = {name: value for name, value in make(3).items() if not isinstance(value, torch.Tensor)}
    assert not difference(loaded(StockLeaves().encode(leaves_of(values))), values)


def test_only_leaves_that_changed_are_made_again(made):
    stock = StockLeaves()
    values = {f"leaf {i}": [i, {"lr": 0.5}] for i in range(100)}
    first = stock.encode(leaves_of(values))
    assert len(made) == 100
    assert stock.encode(leaves_of(values)) is first
    assert len(made) == 100
    for i in range(10):
        values[f"leaf {i}"] = [i, {"lr": 0.25}]
    assert loaded(stock.encode(leaves_of(values))) == values
    assert len(made) == 110
    del values["leaf 5"]
    assert loaded(stock.encode(leaves_of(values))) == values
    values["leaf 5"] = 1.0
    assert loaded(stock.encode(leaves_of(values))) == values
    assert len(made) == 111


def test_leaves_that_differ_in_type_only_are_not_taken_for_equal():
    stock = StockLeaves()
    for value in (1, True, 1.0, 0.0, -0.0, (1,), [1]):
        [found] = loaded(stock.encode(leaves_of({"leaf": value}))).values()
        assert not difference(found, value)


def test_no_leaves_are_no_bytes():
    assert StockLeaves().encode({}) == b""


def test_what_pickle_refuses_is_left_out_and_reported_once(caplog):
    @register
    @dataclasses.dataclass
    class Local:
        x: int

    stock = StockLeaves()
    try:
        with caplog.at_level(logging.WARNING, "ckptd_client"):
            for i in range(3):
                assert loaded(stock.encode(leaves_of({"local": Local(i), "epoch": i}))) == {"epoch": i}
            assert stock.encode(leaves_of({"local": Local(9)})) == b""
    finally:
        del _class_of[_tag_of.pop(Local)]
    [record] = caplog.records
    assert "will not find local" in record.getMessage()


def test_more_than_a_slot_may_hold_is_left_out(monkeypatch):
    monkeypatch.setattr(stock_objects, "MAX_OBJECTS_NBYTES", 5000)
    stock = StockLeaves()
    assert stock.encode(leaves_of({"a": bytes(5000)})) == b""
    assert stock.encode(leaves_of({"a": bytes(50)}))


def test_a_plan_carries_them_for_rank_0_alone():
    state = {"w": torch.zeros(3), "epoch": 1}
    plan = make_plan(state, rank=0, world_size=2)
    assert gather(plan, state).plain.objects == b""
    values = gather(plan, state, StockLeaves())
    assert loaded(values.plain.objects) == {"epoch": 1}
    assert values.plain.nbytes == len(values.plain.leaves) + len(values.plain.objects)
    assert decode_layout(plan.layout, where="here").paths["epoch"] == (("k", "epoch"),)


@pytest.mark.parametrize("index", [{"a": (0, 5)}, {"a": (5, 0)}, {"a": (3, 2)}])
def test_objects_that_claim_bytes_that_are_not_there_are_damage(index):
    with pytest.raises(DamagedError, match="a leaf lies outside"):
        decode_objects(encode_objects(StockObjects(b"1234", index)), where="slot")


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", encode_objects(StockObjects(b"1", {}))[:-1]])
def test_objects_that_are_none_are_damage(data):
    with pytest.raises(DamagedError, match=r"slot: objects.pt is not readable"):
        decode_objects(data, where="slot")
