"""A refusal is raised as the error of its code, whichever that is."""

import pytest

from ckptd.shared.base import errors
from ckptd.shared.base.errors import CkptdError, of_code

CODES = sorted({kind.code for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, CkptdError)})


@pytest.mark.parametrize("code", CODES)
def test_each_code_has_an_error_that_takes_the_refusals_words(code):
    error = of_code(code, "rank 3 was refused", "connect again")
    assert (error.code, error.message, error.hint) == (code, "rank 3 was refused", "connect again")


def test_a_code_of_another_release_is_an_error_too():
    assert type(of_code("new", "why")) is CkptdError
