"""Every loss that a scheme promises to survive, solved against random bytes; every larger one refused."""

import itertools
import random

import pytest

from ckptd.parity.code import Code, schedule
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.format.schemes.double import Double, next_prime
from ckptd.shared.format.schemes.layout import Layout, Symbol


class Copies(Layout):
    """A scheme that is not registered: each member's column as it is on the next two."""

    name = "copies"
    losses = 2
    keeps = "2 times a node's bytes"

    def holders(self, members, group):
        return tuple((group + k) % members for k in (1, 2))

    def data(self, members, group):
        return (group,)

    def equations(self, members):
        return tuple(frozenset({Symbol(0, 0), Symbol(copy, 0)}) for copy in (1, 2))


LAYOUTS = [scheme.layout for scheme in Scheme if scheme.losses] + [Copies()]
SHAPES = [(layout, members) for layout in LAYOUTS for members in range(layout.losses + 1, 11)]
NAMES = [f"{layout.name}-{members}" for layout, members in SHAPES]


def xor(values):
    total = 0
    for value in values:
        total ^= value
    return total


def run(steps, table):
    table = dict(table)
    for target, sources in steps:
        assert target not in table
        table[target] = xor(table[source] for source in sources)
    return table


def a_table(code, seed):
    """A group's whole table: random data, and P and Q as they follow from it."""
    rng = random.Random(seed)
    data = {Symbol(c, r): rng.getrandbits(64) for c in range(code.width) for r in range(code.rows)}
    parity = range(code.width, code.columns)
    wanted = [Symbol(c, r) for c in parity for r in range(code.rows)]
    steps = schedule(code.equations, list(parity), wanted)
    assert steps is not None
    return run(steps, data)


@pytest.mark.parametrize(("scheme", "members"), SHAPES, ids=NAMES)
def test_every_loss_within_the_scheme_is_solved(scheme, members):
    code = Code(scheme, members, 1 << 20)
    table = a_table(code, members)
    columns = range(code.columns)
    for count in range(1, scheme.losses + 1):
        for lost in itertools.combinations(columns, count):
            known = {symbol: value for symbol, value in table.items() if symbol.column not in lost}
            wanted = [symbol for symbol in table if symbol.column in lost]
            steps = schedule(code.equations, lost, wanted)
            assert steps is not None, lost
            assert run(steps, known) == table


@pytest.mark.parametrize(("scheme", "members"), SHAPES, ids=NAMES)
def test_one_loss_more_is_refused(scheme, members):
    code = Code(scheme, members, 1 << 20)
    columns = range(code.columns)
    for lost in itertools.combinations(columns, scheme.losses + 1):
        wanted = [Symbol(column, row) for column in lost for row in range(code.rows)]
        assert schedule(code.equations, lost, wanted) is None, lost


@pytest.mark.parametrize(("scheme", "members"), SHAPES, ids=NAMES)
def test_a_set_that_loses_nodes_loses_no_more_columns_of_a_group_than_nodes(scheme, members):
    """Lost parity counts as a lost column: all that a node held, in any group, is one column of it."""
    code = Code(scheme, members, 1 << 20)
    for group in range(members):
        inside = [*code.data(group), *code.holders(group)]
        assert len(inside) == len({*inside}) == code.columns
        assert {*inside} <= {*range(members)}
    assert sum(len(code.data(group)) for group in range(members)) == members * code.width
    assert {len(code.stored(member)) for member in range(members)} == {scheme.losses}


@pytest.mark.parametrize(("scheme", "members"), SHAPES, ids=NAMES)
def test_each_strip_is_in_one_group(scheme, members):
    code = Code(scheme, members, 1 << 20)
    for member in range(members):
        groups = [group for group in range(members) if member in code.data(group)]
        assert sorted(code.strip(member, group) for group in groups) == list(range(code.width))
        assert all(code.group(member, code.strip(member, group)) == group for group in groups)
        for group, column in code.stored(member):
            assert code.holders(group)[column - code.width] == member


@pytest.mark.parametrize(("scheme", "members"), SHAPES, ids=NAMES)
@pytest.mark.parametrize("nbytes", [0, 1, 4096, 1_000_003, 512 << 20])
def test_strips_cover_the_longest_column_in_whole_pages(scheme, members, nbytes):
    code = Code(scheme, members, nbytes)
    assert code.width * code.strip_nbytes >= nbytes
    assert code.strip_nbytes - nbytes / code.width < 4096 * code.rows
    assert code.symbol_nbytes % 4096 == 0
    assert code.symbol_nbytes * code.rows == code.strip_nbytes
    assert code.parity_nbytes == scheme.losses * code.strip_nbytes


def test_a_single_loss_takes_rows_alone():
    code = Code(Double(), 8, 1 << 20)
    wanted = [Symbol(2, row) for row in range(code.rows)]
    steps = schedule(code.equations, [2], wanted)
    q = code.width + 1
    assert steps is not None
    assert all(source.column != q for step in steps for source in step.sources)
    assert len(steps) == code.rows


def test_what_none_wants_is_not_solved():
    code = Code(Double(), 5, 1 << 20)
    steps = schedule(code.equations, [0], [Symbol(0, 1)])
    assert steps is not None
    assert [step.target for step in steps] == [Symbol(0, 1)]


@pytest.mark.parametrize(("scheme", "members"), [(Scheme.NONE, 4), (Scheme.XOR, 1), (Scheme.DOUBLE, 2)])
def test_sets_that_are_too_small_are_refused(scheme, members):
    with pytest.raises(ValueError, match=str(members)):
        Code(scheme.layout, members, 1)


def test_primes():
    assert [next_prime(n) for n in (2, 3, 4, 6, 8, 9, 14, 63)] == [2, 3, 5, 7, 11, 11, 17, 67]
