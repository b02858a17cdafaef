"""What a set can make good, symbolically: how many columns each group misses, and how many of its parities are left."""

from collections.abc import Sequence

from ckptd.shared.format.schemes import Scheme


def solvable(scheme: Scheme, columns: Sequence[bool], parities: Sequence[bool], wanted: int) -> bool:
    """Whether the wanted column can be made from those columns and members' parities that are there.

    Group g has its parity on member g, and in ``double`` a second one on the member after it; those members' own
    columns are not in the group. A member's parity file is whole or not there.
    """
    count = len(columns)
    if scheme is Scheme.NONE:
        return False
    for group in range(count):
        holders = {group} if scheme is Scheme.XOR else {group, (group + 1) % count}
        if wanted in holders:
            continue
        missing = sum(not columns[m] for m in range(count) if m not in holders)
        if missing > sum(parities[h] for h in holders):
            return False
    return True
