# ruff: noqa: DTZ001, PYI024, PIE796, RUF037 - the odd values are what is tested
import contextlib
import dataclasses
import enum
import io
import math
import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import UTC, date, datetime, time, timedelta, timezone
from pathlib import Path, PurePosixPath, PureWindowsPath
from timeit import repeat
from zoneinfo import ZoneInfo

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.shared.base.errors import DamagedError, RestoreError, UsageError
from ckptd.shared.format.layout import Leaf
from ckptd_client._state.leaves import MAX_DEPTH, _Code, decode_leaf, encode_leaf, register

WHERE = "state['x']"


def same(a, b):
    """Equal in value and in type, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(x, y) and same(u, v) for (x, u), (y, v) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(same, a, b)) and getattr(a, "maxlen", 0) == getattr(b, "maxlen", 0)
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if type(a).__module__ == "torch" and hasattr(a, "numel"):
        return a.dtype == b.dtype and a.shape == b.shape and bytes_of(a) == bytes_of(b)
    if type(a).__module__ == "numpy":
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return bool(a == b)


def bytes_of(tensor):
    torch = pytest.importorskip("torch")
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def back(value):
    return decode_leaf(encode_leaf(value, WHERE), WHERE)


@register
class Colour(enum.Enum):
    RED = 1
    ALSO_RED = 1
    BLUE = (2, 3)


@register
class Mode(enum.Flag):
    A = 1
    B = 2


@register
@dataclasses.dataclass(frozen=True, slots=True)
class Cursor:
    file: str
    offsets: tuple[int, ...]


Point = register(namedtuple("Point", "x y"), "test.Point")


class Unknown(enum.Enum):
    X = 1


HERE = timezone(timedelta(hours=5, minutes=30))
VALUES = [
    None, True, 0, -1, 2**63 - 1, -(2**63), 2**63, 2**64, 2**200, -(2**200), 0.0, -0.0, math.inf, math.nan, 1e-320,
    "", "é☃\0", "\ud800", b"", b"\0\xff",
    [], {}, (), [[]], [1, 2.5, "x", None],
    [2**70, 1], (1, (2, [3])), {"a": {"b": ()}},
    {1: 2}, {None: 1, 2.5: (), (1, 2): "t", b"k": 1}, {True: 1}, set(), {1, "a", None, (1, 2)},
    {"\ud800"}, frozenset({3}),
    1 + 2j, complex(math.inf, -0.0), OrderedDict([("b", 1), ("a", 2)]), OrderedDict([(1, [2])]), Counter("hello"),
    deque([1, [2]]), deque([1, 2], 5), deque((), 0),
    date(1, 1, 1), datetime(2024, 2, 29, 1, 2, 3, 4), datetime(2024, 1, 1, tzinfo=UTC),
    datetime(2024, 1, 1, fold=1, tzinfo=HERE),
    time(1, 2, 3, 4, tzinfo=HERE), time(5, fold=1), timedelta(-3, 5, 7), timedelta.max, PurePosixPath("a/b"),
    Colour.BLUE, Colour.ALSO_RED, Mode.A | Mode.B, Mode(0), Cursor("f", (1, 2)), Point(1, [Point(2, 3)]),
    [Colour.RED, {"p": Point(1, 2)}],
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=[str(i) for i in range(len(VALUES))])  # a set prints in any order
def test_values_come_back_in_value_and_type(value):
    assert same(back(value), value)


def test_types_that_come_back_as_a_plainer_one():
    assert same(back(Path("/a/b")), PurePosixPath("/a/b"))
    assert same(back(defaultdict(list, {1: [2]})), {1: [2]})
    assert back(datetime(2024, 1, 1, fold=1)).fold == 1


def test_random_states():
    generator = random.Random(3)
    expected = generator.random()
    generator.seed(3)
    fresh = random.Random()
    fresh.setstate(back(generator.getstate()))
    assert fresh.random() == expected


def test_numpy():
    np = pytest.importorskip("numpy")
    arrays = [np.zeros((2, 0, 3)), np.array(5), np.asfortranarray(np.arange(6).reshape(2, 3)), np.arange(9)[::2]]
    arrays += [
        np.array([1, 2], ">i2"),
        np.array(["a", "bcd"]),
        np.array([b"x"]),
        np.array([True, False]),
        np.array([1 + 2j]),
    ]
    arrays += [
        np.array(["2024-01-01", "NaT"], "M8[s]"),
        np.array([3], "m8[25us]"),
        np.float16([1.5]),
        np.longdouble([1.5]),
    ]
    scalars = [np.float64(-0.0), np.float32("nan"), np.int8(-3), np.bool_(True), np.str_("ab"), np.bytes_(b"q")]
    for value in [*arrays, *scalars, np.datetime64("2024-01-01"), {"nested": (np.int64(1), [np.arange(3)])}]:
        assert same(back(value), value), value
    array = back(np.arange(3))
    array[0] = 7  # its own memory, writable
    legacy = np.random.RandomState(5)
    clone = np.random.RandomState()
    clone.set_state(back(legacy.get_state()))
    assert clone.random_sample() == legacy.random_sample()
    modern = np.random.default_rng(5)
    other = np.random.default_rng()
    other.bit_generator.state = back(modern.bit_generator.state)
    assert other.random() == modern.random()


def test_numpy_without_an_encoding():
    np = pytest.importorskip("numpy")
    bad = [np.array([{}]), np.zeros(2, "i4,f4"), np.zeros(2, "i4,f4")[0], np.ma.masked_array([1]), np.zeros(1, "V0")]
    for value in bad:
        with pytest.raises(UsageError, match=r"state\['x'\]\[1\] cannot be saved"):
            encode_leaf([0, value], WHERE)


def test_torch():
    torch = pytest.importorskip("torch")
    values = [
        torch.Size([2, 3]),
        torch.Size([]),
        torch.bfloat16,
        torch.complex128,
        torch.device("cpu"),
        torch.device("cuda", 3),
    ]
    values += [
        torch.get_rng_state(),
        torch.tensor(3.5),
        torch.empty(0, 2),
        torch.randn(3, 4).t(),
        torch.tensor([True, False]),
    ]
    values += [torch.randn(3).bfloat16(), torch.randn(3).to(torch.float8_e5m2), torch.randn(2, dtype=torch.complex128)]
    values += [{"deep": [(torch.ones(2, dtype=torch.uint16),)]}]
    for value in values:
        assert same(back(value), value), value
    conjugated = torch.randn(2, dtype=torch.complex64).conj()
    assert torch.equal(back(conjugated), conjugated.resolve_conj())
    back(torch.ones(2)).add_(1)  # its own memory


def test_torch_without_an_encoding():
    torch = pytest.importorskip("torch")
    large = torch.empty((16 << 20) + 1, dtype=torch.uint8)
    for value in [
        large,
        torch.eye(2).to_sparse(),
        torch.ones(1, device="meta"),
        torch.nn.Parameter(torch.ones(1)),
        torch.qint8,
    ]:
        with pytest.raises(UsageError, match=r"state\['x'\] \(a member\) cannot be saved"):
            encode_leaf({value}, WHERE)


@pytest.mark.filterwarnings("ignore")
def test_schedulers_and_scaler():
    torch = pytest.importorskip("torch")
    sched = torch.optim.lr_scheduler
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    made = [
        sched.CosineAnnealingLR(optimizer, 10),
        sched.OneCycleLR(optimizer, 0.1, total_steps=10),
        sched.ReduceLROnPlateau(optimizer),
        sched.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
        sched.MultiStepLR(optimizer, [3, 5, 5]),
        sched.SequentialLR(optimizer, [sched.ConstantLR(optimizer), sched.ExponentialLR(optimizer, 0.9)], [4]),
        sched.ChainedScheduler([sched.StepLR(optimizer, 2), sched.LinearLR(optimizer)], optimizer),
        torch.amp.GradScaler("cpu"),
    ]
    for item in made:
        state = item.state_dict()
        assert same(back(state), state), item


@pytest.mark.parametrize(
    ("value", "place", "hint"),
    [
        ({"a": [1, {"b": object()}]}, "state['x']['a'][1]['b'] cannot", "plain values"),
        ((1, lambda: 0), "state['x'][1] cannot", "plain values"),
        ([Unknown.X], "state['x'][0] cannot", "register(Unknown)"),
        ({(1, 2): object()}, "state['x'] (a value) cannot", "plain values"),
        ({7: object()}, "state['x'][7] cannot", "plain values"),
        ({object(): 1}, "state['x'] (a key) cannot", "plain values"),
        (Cursor("f", object()), "state['x'].offsets cannot", "plain values"),
        (deque([0, datetime(2024, 1, 1, tzinfo=ZoneInfo("UTC"))]), "state['x'][1] cannot", "timezone.utc"),
        (type("Sub", (dict,), {})(), "state['x'] cannot", "plain values"),
        (type("Sub", (int,), {})(), "state['x'] cannot", "plain values"),
        (PureWindowsPath("c:/"), "state['x'] cannot", "str(path)"),
        (namedtuple("Q", "a")(1), "state['x'] cannot", "register(Q)"),
    ],
)
def test_unknown_types_are_refused_with_their_place(value, place, hint):
    with pytest.raises(UsageError) as caught:
        encode_leaf(value, WHERE)
    assert place in caught.value.message
    assert hint in caught.value.hint


def test_cycles_are_refused():
    loop = []
    loop.append(loop)
    with pytest.raises(UsageError, match="contains itself"):
        encode_leaf(loop, WHERE)
    deepest = []
    for _ in range(MAX_DEPTH - 1):
        deepest = (deepest,)
    assert back(deepest) == deepest


def test_equal_sets_encode_alike():
    words = [str(i) for i in range(50)]
    backwards = words[::-1]
    assert encode_leaf(set(words), WHERE) == encode_leaf(set(backwards), WHERE)


def test_register_refuses_other_classes_and_taken_tags():
    for cls, tag in [(dict, None), (Colour, "other"), (Unknown, "test.Point")]:
        with pytest.raises(UsageError):
            register(cls, tag)
    assert register(Colour) is Colour


def ext(code, body):
    return Leaf("safe/1", msgpack.packb(msgpack.ExtType(code, msgpack.packb(body))))


@pytest.mark.parametrize(
    "leaf",
    [
        Leaf("pickle", b""),
        ext(99, None),
        ext(_Code.ENUM, ["os:system", "x"]),
        ext(_Code.ENUM, ["test.Point", "x"]),
        ext(_Code.ENUM, [f"{Colour.__module__}:Colour", "GREEN"]),
        ext(_Code.DATACLASS, [f"{Cursor.__module__}:Cursor", {"file": "f"}]),
        ext(_Code.NAMEDTUPLE, ["test.Point", [1]]),
    ],
    ids=repr,
)
def test_what_this_process_cannot_build_is_a_restore_error(leaf):
    with pytest.raises(RestoreError, match=r"state\['x'\]"):
        decode_leaf(leaf, WHERE)


def nested(depth):
    data = b"\x90"
    for _ in range(depth):
        data = msgpack.packb(msgpack.ExtType(_Code.TUPLE, data))
    return data


@pytest.mark.parametrize(
    "leaf",
    [
        Leaf("safe/1", b""),
        Leaf("safe/1", b"\xc1"),
        Leaf("safe/1", b"\x01\x02"),
        Leaf("safe/1", b"\xdd\xff\xff\xff\xff"),
        Leaf("safe/1", b"\x91" * 100_000),
        Leaf("safe/1", nested(2000)),
        ext(_Code.SET, [[1]]),
        ext(_Code.DICT, [[1, 2], [1, 3]]),
        ext(_Code.DEQUE, [1, [1, 2]]),
        ext(_Code.DEQUE, [-1, []]),
        ext(_Code.DATE, [2024, 13, 1]),
        ext(_Code.DATETIME, [2024, 1, 1, 0, 0, 0, 0, 0, 10**15]),
        ext(_Code.TIMEDELTA, [10**12, 0, 0]),
        ext(_Code.COMPLEX, ["1", 2]),
        ext(_Code.BIGINT, "x"),
        ext(_Code.PATH, 3),
        ext(_Code.TENSOR, ["float32", [1 << 40], b""]),
        ext(_Code.TENSOR, ["float32", [-1], b"1234"]),
        ext(_Code.TENSOR, ["load", [1], b"1234"]),
        ext(_Code.TENSOR, ["bool", [1], b"\x02"]),
        ext(_Code.TENSOR, ["float32", [1] * 65, b"1234"]),
        ext(_Code.TENSOR, ["float32", [0, 1 << 62, 1 << 62], b""]),
        ext(_Code.TORCH_DTYPE, "nn"),
        ext(_Code.TORCH_DEVICE, "nowhere:1"),
        ext(_Code.TORCH_DEVICE, 5),
        ext(_Code.TORCH_SIZE, [1 << 63]),
        ext(_Code.NUMPY_ARRAY, ["|O", [1], b"12345678"]),
        ext(_Code.NUMPY_ARRAY, ["<f3", [1], b"123"]),
        ext(_Code.NUMPY_ARRAY, ["<f8", [1 << 40], b"12345678"]),
        ext(_Code.NUMPY_ARRAY, ["|V0", [1 << 40], b""]),
        ext(_Code.NUMPY_ARRAY, ["<f8,<f8", [1], b"1" * 16]),
        ext(_Code.NUMPY_SCALAR, ["<U1", b"\xff\xff\xff\xff"]),
        ext(_Code.NUMPY_SCALAR, ["<M8[0s]", b"12345678"]),
    ],
    ids=lambda leaf: repr(leaf)[:60],
)
def test_malformed_bytes_are_damage(leaf):
    with pytest.raises(DamagedError, match=r"state\['x'\]"):
        decode_leaf(leaf, WHERE)


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=5),
    st.complex_numbers(),
    st.dates(), st.datetimes(timezones=st.none() | st.just(HERE)), st.times(), st.timedeltas(), st.sampled_from(Colour),
)  # fmt: skip
hashable = st.one_of(st.none(), st.integers(), st.text(max_size=5), st.tuples(st.integers(), st.text(max_size=3)))
nestings = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(hashable, inner, max_size=4),
        st.dictionaries(st.text(max_size=4), inner, max_size=4),
        st.dictionaries(hashable, inner, max_size=4).map(OrderedDict),
        st.lists(inner, max_size=4).map(deque),
        st.builds(Point, inner, inner),
        st.sets(hashable, max_size=4),
        st.frozensets(hashable, max_size=4),
    ),
    max_leaves=15,
)


@given(nestings)
@settings(deadline=None)
def test_any_nesting_comes_back(value):
    assert same(back(value), value)


bodies = st.recursive(
    st.one_of(st.none(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.binary(max_size=9), st.sampled_from(
        ["test.Point", f"{Mode.__module__}:Mode", "float32", "<f8", "|b1", "<U2", "<M8[s]", "cuda:1", "x"])),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=8,
)  # fmt: skip


@given(st.binary(max_size=64) | st.builds(lambda code, body: ext(code, body).data, st.sampled_from(_Code), bodies))
@settings(deadline=None, max_examples=400)
def test_hostile_bytes_raise_our_errors_only(data):
    with contextlib.suppress(DamagedError, RestoreError):
        decode_leaf(Leaf("safe/1", data), WHERE)


def test_a_hundred_leaves_are_fast():
    values = [1, 2.5, "abc", None, True, [1, 2, 3], {"a": 1, "b": [1.5]}, (0.9, 0.999), {"lr": 0.1}, "adam"] * 10
    taken = min(repeat(lambda: [encode_leaf(value, WHERE) for value in values], number=1, repeat=5))
    assert taken < 0.001  # 0.0001 measured


def test_bytes_in_a_stream_keep_content_and_position():
    stream = io.BytesIO(b"some bytes")
    stream.seek(4)
    again = decode_leaf(encode_leaf(stream, "state['x']"), "state['x']")
    assert type(again) is io.BytesIO
    assert (again.getvalue(), again.tell()) == (b"some bytes", 4)
