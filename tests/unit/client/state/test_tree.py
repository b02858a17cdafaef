import random
from collections import Counter, OrderedDict, namedtuple
from timeit import repeat

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from ckptd.shared.base.errors import DamagedError, MismatchError, UsageError
from ckptd_client._state.tree import MAX_DEPTH, assign, collect, flatten, format_path, unflatten


class Tensor:
    """Stands in for a tensor: the tree only asks is_tensor."""


class Counted:
    """A Stateful with a given state."""

    def __init__(self, content):
        self.content = content
        self.calls = 0

    def state_dict(self):
        self.calls += 1
        return self.content

    def load_state_dict(self, state):
        self.content = state


def is_tensor(value):
    return isinstance(value, Tensor)


def flat(state):
    return flatten(state, is_tensor)


T = Tensor()
Pair = namedtuple("Pair", "a b")  # noqa: PYI024


def test_names_and_paths_follow_the_nesting():
    found = flat({"model": OrderedDict(w=T, b=T), 7: [T, (1, T)], "step": 3})
    assert found.names == ["model.w", "model.b", "7.0", "7.1.0", "7.1.1", "step"]
    assert found.paths[4] == (("i", 7), ("l", 1), ("t", 1))
    assert found.values == [T, T, T, 1, T, 3]
    assert format_path(found.paths[4]) == "state[7][1][1]"


def test_sequences_without_tensors_are_one_leaf_and_empty_containers_are_leaves():
    random_state = random.getstate()
    state = {
        "rng": random_state,
        "betas": (0.9, [0.99]),
        "groups": [{"lr": 1}, {}],
        "none": [],
        "empty": {},
        "unit": (),
    }
    found = flat(state)
    assert found.names == ["rng", "betas", "groups.0.lr", "groups.1", "none", "empty", "unit"]
    assert found.values == [random_state, (0.9, [0.99]), 1, {}, [], {}, ()]


def test_names_are_those_of_torch():
    torch = pytest.importorskip("torch")
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict  # noqa: PLC0415

    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    state = {"m": model.state_dict(), "o": optimizer.state_dict(), "l": [1, [2, [3]]], "x": [1, [torch.ones(1)]]}
    ours = flatten(state, lambda value: isinstance(value, torch.Tensor))
    assert ours.names == list(flatten_state_dict(state)[0])


def test_other_types_are_leaves():
    values = [Pair(T, 1), Counter("ab"), {1, 2}, None, dict]
    found = flat({"a": values, "b": T})
    assert found.names == ["a", "b"]
    assert found.values[0] is values


@pytest.mark.parametrize(
    ("state", "fragments"),
    [
        ({"a.b": 1, "a": {"b": 2}}, ["state['a.b']", "state['a']['b']"]),
        ({1: 1, "1": 2}, ["state[1]", "state['1']"]),
        ({"a": {"b": {(0, 1): T}}}, ["state['a']['b']", "(0, 1)", "tuple"]),
        ({True: 1}, ["True", "bool"]),
        ({1 << 63: 1}, ["int"]),
        ({"a": {"\ud800": 1}}, ["\\ud800", "Unicode"]),
        (3, ["the state is a int"]),
        (T, ["the state is a Tensor"]),
        (Counted(None), ["the state is a NoneType"]),
    ],
)
def test_what_cannot_be_named_is_a_usage_error(state, fragments):
    with pytest.raises(UsageError) as caught:
        flat(state)
    assert all(fragment in caught.value.message for fragment in fragments), caught.value.message


def test_cycles_are_usage_errors():
    loop = {"a": 1}
    loop["self"] = loop
    sequence = [T]
    sequence.append([sequence, sequence])
    plain = []
    plain += [plain, plain]
    stateful = Counted({})
    stateful.content["again"] = stateful
    deep = T
    for _ in range(MAX_DEPTH + 5):
        deep = {"d": deep}
    for state in (loop, sequence, [plain], {"x": plain}, stateful):
        with pytest.raises(UsageError, match=r"state\S+ contains itself\n  hint: leave state\S+ out of the state"):
            flat(state)
    with pytest.raises(UsageError, match=r"state\['d'\] is nested deeper than 100 levels"):
        flat(deep)


def test_the_same_container_twice_is_no_cycle():
    shared = {"w": T}
    assert flat([shared, {"again": shared}]).names == ["0.w", "1.again.w"]


@pytest.mark.parametrize("state", [{}, [], (), OrderedDict(), Counted({})])
def test_an_empty_root_has_no_leaves(state):
    found = flat(state)
    assert found.names == []
    assert collect(state, found.structure) == []
    assert unflatten([]) == {}


def test_plain_sequence_as_root():
    found = flat([1, (2, 3)])
    assert (found.names, found.values) == (["0", "1"], [1, (2, 3)])
    assert collect([5, 6], found.structure) == [5, 6]


def test_statefuls_are_called_once_and_recorded():
    inner = Counted({"x": T})
    outer = Counted({"inner": inner, "n": 1})
    bare = Counted(OrderedDict())
    found = flat({"o": outer, "l": [bare]})
    assert found.names == ["o.inner.x", "o.n", "l.0"]
    assert found.statefuls == [
        ((("k", "o"),), outer),
        ((("k", "o"), ("k", "inner")), inner),
        ((("k", "l"), ("l", 0)), bare),
    ]
    assert [inner.calls, outer.calls, bare.calls] == [1, 1, 1]
    assert collect({"o": outer, "l": [bare]}, found.structure) == [T, 1, {}]
    assert flat(outer).statefuls[0] == ((), outer)


def test_collect_gives_new_values_in_the_order_of_flatten():
    found = flat({"a": {"x": T, "y": T}, "l": [1, {"z": T}], "s": (1, 2)})
    x, y, z = Tensor(), Tensor(), Tensor()
    assert collect({"a": {"x": x, "y": y}, "l": [2.5, {"z": z}], "s": [3]}, found.structure) == [x, y, 2.5, z, [3]]


BASE = {"a": {"x": T, "y": T}, "l": [1, {"z": T}], "e": {}, "s": (1, 2)}


@pytest.mark.parametrize(
    "change",
    [
        {"a": {"x": T}},
        {"a": {"y": T, "x": T}},
        {"a": {"x": T, "y": T, "z": T}},
        {"a": OrderedDict(x=T, y=T)},
        {"a": {"x": T, "y": {"deep": T}}},
        {"a": {"x": T, "y": {}}, "l": [1, {"z": T}, 2]},
        {"a": {"x": T, "y": Counted({})}},
        {"a": T},
        {"l": [1, {"z": [T]}]},
        {"l": (1, {"z": T})},
        {"e": {"x": 1}},
        {"s": (1, T)},
        {"s": [{}]},
        {"s": Counted({})},
        {"new": 1},
    ],
)
def test_collect_sees_every_change_of_structure(change):
    found = flat(BASE)
    changed = {**BASE, **change}
    assert collect(changed, found.structure) is None
    assert flat(changed).structure != found.structure
    assert collect(BASE, found.structure) == found.values


def test_collect_sees_another_stateful():
    found = flat({"m": Counted({"x": T})})
    other = type("Other", (Counted,), {})
    assert collect({"m": Counted({"x": T, "y": T})}, found.structure) is None
    assert collect({"m": other({"x": T})}, found.structure) is None
    assert collect({"m": {"x": T}}, found.structure) is None


def test_leaves_may_change_their_type():
    found = flat({"best": None, "rest": []})
    assert collect({"best": 0.5, "rest": {1, 2}}, found.structure) == [0.5, {1, 2}]
    assert collect({"best": [1], "rest": {}}, found.structure) == [[1], {}]


leaves = st.one_of(st.just(T), st.integers(), st.text(max_size=3), st.none(), st.just({}), st.just(()), st.just([]))
keys = st.one_of(st.text(max_size=4), st.integers(-5, 5))
states = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.dictionaries(keys, inner, max_size=4),
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
    ),
    max_leaves=20,
)


@given(st.dictionaries(keys, states, max_size=4))
def test_a_state_comes_back_as_it_was(state):
    try:
        found = flat(state)
    except UsageError:
        reject()  # two keys that look alike
    assert unflatten(zip(found.paths, found.values, strict=True)) == state
    assert collect(state, found.structure) == found.values
    assert flat(state).structure == found.structure
    for path, value in zip(found.paths, found.values, strict=True):
        assign(state, path, value)
    assert flat(state).values == found.values


def test_unflatten_takes_leaves_in_any_order():
    found = flat({"l": [T, 1, (2, T)]})
    items = list(zip(found.paths, found.values, strict=True))
    assert unflatten(reversed(items)) == {"l": [T, 1, (2, T)]}


@pytest.mark.parametrize(
    "paths",
    [
        [()],
        [(("k", "a"),), (("k", "a"),)],
        [(("k", "a"),), (("k", "a"), ("k", "b"))],
        [(("k", "a"), ("k", "b")), (("k", "a"),)],
        [(("k", "a"), ("l", 1))],
        [(("k", "a"), ("l", -1))],
        [(("k", "a"), ("l", 0)), (("k", "a"), ("t", 1))],
        [(("k", "a"),), (("l", 0),)],
        [(("k", 1),)],
        [(("l", "x"),)],
        [tuple(("k", "a") for _ in range(MAX_DEPTH + 1))],
    ],
)
def test_paths_that_contradict_are_damage(paths):
    with pytest.raises(DamagedError):
        unflatten([(path, 1) for path in paths])


def test_assign_reaches_into_tuples_and_stops_at_a_root_tuple():
    state = {"a": [(1, (2, 3))], 5: 0}
    assign(state, (("k", "a"), ("l", 0), ("t", 1), ("t", 0)), "new")
    assign(state, (("i", 5),), 6)
    assert state == {"a": [(1, ("new", 3))], 5: 6}
    with pytest.raises(UsageError, match=r"state\[0\]"):
        assign((1, 2), (("t", 0),), 3)


@pytest.mark.parametrize("path", [(("k", "b"), ("l", 0)), (("k", "a"), ("l", 3)), (("k", "a"), ("l", 0), ("k", "x"))])
def test_assign_names_a_missing_place(path):
    with pytest.raises(MismatchError, match="has no place state"):
        assign({"a": [1]}, path, 2)


def test_collect_is_fast():
    state = {f"layer.{i}.weight": Tensor() for i in range(10_000)}
    structure = flat(state).structure
    assert min(repeat(lambda: collect(state, structure), number=1, repeat=5)) < 0.005  # 0.0002 measured
