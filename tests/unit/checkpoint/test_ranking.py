"""The order of checkpoints by what their trainings said, and which match."""

import math

import pytest

from ckptd.checkpoint.ranking import Order, best, check_key, condition_of, order_of, ordered
from ckptd.shared.base.errors import UsageError

SAID = [{"x": 2}, {"x": "b"}, {}, {"x": 1.5}, {"x": None}, {"x": True}, {"x": "a"}, {"x": math.nan}, {"x": 2.0}]


def test_numbers_first_then_text_then_what_has_no_value():
    found = ordered(range(9), SAID.__getitem__, Order("x"))
    assert found == [5, 3, 0, 8, 6, 1, 2, 4, 7], "equal ones as they came"
    assert ordered(range(9), SAID.__getitem__, Order("x", largest=True)) == [0, 8, 3, 5, 1, 6, 2, 4, 7]


def test_only_numbers_can_be_the_best():
    assert best(range(9), SAID.__getitem__, Order("x", largest=True), 9) == [0, 8, 3, 5]
    assert best(range(9), SAID.__getitem__, Order("x"), 2) == [5, 3]


@pytest.mark.parametrize(
    ("text", "order"),
    [("loss", Order("loss")), ("loss:min", Order("loss")), ("acc:max", Order("acc", largest=True)),
     ("a:b", Order("a:b")), (":max", Order(":max")), ("a:max:min", Order("a:max"))],
)  # fmt: skip
def test_orders(text, order):
    assert order_of(text) == order


@pytest.mark.parametrize(
    ("text", "matching"),
    [
        ("x<2", [3, 5]), ("x <= 2", [0, 3, 5, 8]), ("x=2", [0, 8]), ("x==2", [0, 8]), ("x!=2", [3, 5]),
        ("x>1.5", [0, 8]), ("x>=1.5", [0, 3, 8]), ("x=a", [6]), ("x>a", [1]), ("x!=a", [1]), ("x=true", [5]),
        ("x=nan", []), ("y=1", []),
    ],
)  # fmt: skip
def test_conditions(text, matching):
    condition = condition_of(text)
    assert [i for i, said in enumerate(SAID) if condition.matches(said)] == matching


@pytest.mark.parametrize("text", ["", "x", "<1", "=", "x=<1", "x<>1"])
def test_what_compares_nothing(text):
    with pytest.raises(UsageError, match="compares nothing"):
        condition_of(text)


def test_a_key_that_none_has():
    check_key("x", SAID)
    for key, said, hint in (
        ("los", [{"loss": 1}], "did you mean loss?"),
        ("loss", SAID, "there are x"),
        ("x", [], "save("),
    ):
        with pytest.raises(UsageError) as caught:
            check_key(key, said)
        assert hint in caught.value.hint
