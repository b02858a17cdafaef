"""A process that tests have forked has the memory that an interpreter of its own would have."""

import itertools
import sys

from tests import pythons

HUGE_NBYTES = 2 << 20
_HEAP = """
import torch
def heap():
    return [line.split()[0] for line in open("/proc/self/maps") if "[heap]" in line]
first, tensors = heap(), []
while heap() == first and len(tensors) < 100_000:  # what the server has freed is used up first
    tensors += [torch.zeros(1 << 14) for _ in range(100)]
print(*heap())
"""


def test_no_huge_page_lies_in_two_mappings_of_a_heap():
    """The heap that a fork has got is a mapping that never grows: such a page could not be made."""
    done = pythons.run([sys.executable, "-c", _HEAP], capture_output=True, text=True, check=True, timeout=120)
    mappings = [[int(end, 16) for end in part.split("-")] for part in done.stdout.split()]
    assert len(mappings) > 1, "the heap has not grown"
    for (_, stop), (start, _) in itertools.pairwise(mappings):
        assert stop == start
        assert stop % HUGE_NBYTES == 0
