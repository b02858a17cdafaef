"""A limit that no free space helps against is named as such, with what to type."""

import errno
import os

import pytest

from ckptd import ballast
from ckptd.protocol.errors import BudgetError


@pytest.mark.parametrize(
    ("code", "typed"), [(errno.EFBIG, "ulimit -f"), (errno.EDQUOT, "quota -s"), (errno.ENOSPC, "du -sh")]
)
def test_what_is_typed_against_a_limit(tmp_path, code, typed):
    with pytest.raises(BudgetError) as caught, ballast.told_when_full(str(tmp_path), "a file"):
        raise OSError(code, os.strerror(code))
    assert typed in caught.value.hint
    assert (typed == "du -sh") == ("du -sh" in caught.value.hint)


def test_another_error_is_left_alone(tmp_path):
    with pytest.raises(PermissionError), ballast.told_when_full(str(tmp_path), "a file"):
        raise PermissionError(errno.EACCES, "no")
