"""A limit that no free space helps against is named as such, with what to type."""

import errno
import os

import pytest

from ckptd.shared.base.errors import BudgetError
from ckptd.shared.files import spare_pages


@pytest.mark.parametrize(
    ("code", "typed"), [(errno.EFBIG, "ulimit -f"), (errno.EDQUOT, "quota -s"), (errno.ENOSPC, "du -sh")]
)
def test_what_is_typed_against_a_limit(tmp_path, code, typed):
    with pytest.raises(BudgetError) as caught, spare_pages.told_when_full(str(tmp_path), "a file"):
        raise OSError(code, os.strerror(code))
    assert typed in caught.value.hint
    assert (typed == "du -sh") == ("du -sh" in caught.value.hint)


def test_another_error_is_left_alone(tmp_path):
    with pytest.raises(PermissionError), spare_pages.told_when_full(str(tmp_path), "a file"):
        raise PermissionError(errno.EACCES, "no")
