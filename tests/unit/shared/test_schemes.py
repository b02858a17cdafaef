"""Redundancy schemes as a whole; tests/unit/parity/test_code.py has what each promises."""

import pytest

from ckptd.shared.format.schemes import DEFAULT, Scheme
from tests.unit.sources import ROOT


def table():
    """Rows of docs/settings.md."""
    rows = ["| scheme | nodes of a set that may be lost | a node keeps | N at most |", "|---|---|---|---|"]
    for scheme in Scheme:
        name = f"`{scheme}`" + (", the default" if scheme is DEFAULT else "")
        rows.append(f"| {name} | {scheme.losses} | {scheme.layout.keeps} | {scheme.max_set_size} |")
    return "\n".join(rows)


def test_the_document_lists_them():
    """``python -m tests.unit.shared.test_schemes`` prints it."""
    assert table() in (ROOT / "docs" / "settings.md").read_text()


@pytest.mark.parametrize(
    ("scheme", "members", "in_force"),
    [
        ("double", 3, "double"), ("double", 2, "xor"), ("double", 1, "none"), ("xor", 2, "xor"), ("xor", 1, "none"),
        ("none", 8, "none"), ("xor", 0, "none"),
    ],
)  # fmt: skip
def test_few_nodes_carry_less(scheme, members, in_force):
    assert Scheme[scheme.upper()].among(members) == in_force


def test_large_sets_take_another_one():
    for size in (2, 16, 17, 64):
        assert all(scheme.for_sets_of(size).max_set_size >= size for scheme in Scheme)
    assert Scheme.DOUBLE.for_sets_of(16) is Scheme.DOUBLE
    assert Scheme.DOUBLE.for_sets_of(17) is not Scheme.DOUBLE


if __name__ == "__main__":
    print(table())
