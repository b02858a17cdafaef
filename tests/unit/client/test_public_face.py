"""What a user sees of the packages: names, a client's repr, and where to look for what is not there."""

import subprocess
import sys

import pytest

import ckptd
import ckptd_client


def test_only_what_is_public_is_shown():
    assert dir(ckptd_client) == sorted(ckptd_client.__all__)
    assert all(hasattr(ckptd_client, name) for name in ckptd_client.__all__)
    assert ckptd_client.__version__ == ckptd.__version__


@pytest.mark.parametrize("name", ["connect", "save", "Client"])
def test_the_daemons_package_says_where_the_client_is(name):
    with pytest.raises(AttributeError, match="import ckptd_client"):
        getattr(ckptd, name)


def test_other_names_are_missing_as_ever():
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        ckptd.nothing  # noqa: B018 - the question is the test
    code = "import ckptd, sys; sys.exit(hasattr(ckptd, 'connect') or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0


def test_a_client_says_what_it_is_of(join):
    client = join()
    assert repr(client) == (
        f"<Client of job {client.job!r}: rank 0 of 1, store {client._link.job.store!r}, incarnation 1>"
    )
    client.close()
    assert repr(client).endswith("closed>")


def test_a_handle_shows_what_is_public_and_nothing_else():
    names = {name for name in dir(ckptd_client.SaveHandle) if not (name.startswith("__") and name.endswith("__"))}
    assert names == {"end", "milestone", "reason", "save_id", "stall_s", "step", "wait"}


def test_all_who_ask_for_the_handle_of_a_save_get_the_same(join):
    client = join()
    handle = client.save({"a": 1}, 1)
    assert client.wait("staged") is handle


def test_a_client_shows_nothing_that_is_ours_alone():
    internal = {"find", "pickle_keys", "link", "staging", "saving"}
    assert not internal & set(dir(ckptd_client.Client))
