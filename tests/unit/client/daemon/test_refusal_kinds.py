"""A refusal is raised as the error of its code, whichever that is."""

import pytest

from ckptd_client._daemon.channel import _KINDS


@pytest.mark.parametrize("code", sorted(_KINDS))
def test_each_code_has_an_error_that_takes_the_refusals_words(code):
    error = _KINDS[code]("rank 3 was refused", hint="connect again")
    assert (error.code, error.message, error.hint) == (code, "rank 3 was refused", "connect again")
