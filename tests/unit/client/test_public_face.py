"""What a user sees of the packages: names, a client's repr, and where to look for what is not there."""

import builtins
import importlib
import inspect
import re
import subprocess
import sys
import typing

import pytest
import torch.distributed.checkpoint as dcp

import ckptd
import ckptd_client
import ckptd_client.dcp
from ckptd.shared.base import errors
from tests.unit.sources import ROOT


def test_only_what_is_public_is_shown():
    assert dir(ckptd_client) == sorted(ckptd_client.__all__)
    assert all(hasattr(ckptd_client, name) for name in ckptd_client.__all__)
    assert ckptd_client.__version__ == ckptd.__version__


@pytest.mark.parametrize("name", ["connect", "save", "Client"])
def test_the_daemons_package_says_where_the_client_is(name):
    with pytest.raises(AttributeError, match="import ckptd_client"):
        getattr(ckptd, name)


def test_other_names_are_missing_as_before():
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        ckptd.nothing  # noqa: B018 - the question is the test
    code = "import ckptd, sys; sys.exit(hasattr(ckptd, 'connect') or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


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


# --- errors and types


def members(owner, names):
    """(name, object) of each of these names, and of the public methods and properties of those that are classes."""
    for name in names:
        found = vars(owner)[name]
        yield name, found
        if inspect.isclass(found):
            for base in found.__mro__:
                if base.__module__.startswith("ckptd"):
                    yield from ((f"{name}.{n}", one) for n, one in vars(base).items() if not n.startswith("_"))


def public():
    """(name, object) of all that users may call."""
    yield from members(ckptd_client, ckptd_client.__all__)
    yield from members(ckptd_client.dcp, ckptd_client.dcp.__all__)
    for path in sorted((ROOT / "client/ckptd_client/integrations").glob("[a-z]*.py")):
        module = importlib.import_module(f"ckptd_client.integrations.{path.stem}")
        own = [
            n for n, one in vars(module).items() if getattr(one, "__module__", "") == module.__name__ and n[0] != "_"
        ]
        yield from members(module, own)


def named_errors(found):
    return set(re.findall(r"\b[A-Z]\w*(?:Error|Exception)\b", inspect.getdoc(found) or ""))


def test_each_error_that_a_docstring_names_can_be_imported_from_the_package():
    known = {*ckptd_client.__all__, *dir(builtins), *dir(dcp)}
    documented = {(name, error) for name, found in public() for error in named_errors(found)}
    assert sorted((name, error) for name, error in documented if error not in known) == []
    assert {("Client.steps", "PeerError"), ("Client.save", "UsageError"), ("connect", "ConnectError")} <= documented


def test_each_error_that_a_daemon_may_answer_with_can_be_imported_from_the_package():
    """A refusal is raised as the class that has its code."""
    own = {name for name, one in vars(errors).items() if inspect.isclass(one) and "code" in vars(one)}
    assert own <= set(ckptd_client.__all__)
    assert len(own) > 12


def test_each_public_class_can_be_had_or_given():
    """By the signature or the docstring of something else that is public."""
    texts = [(name.partition(".")[0], f"{inspect.getdoc(one)} {types_of(one)}") for name, one in public()]
    others = {name: " ".join(text for place, text in texts if place != name) for name in ckptd_client.__all__}
    classes = {name for name in others if inspect.isclass(getattr(ckptd_client, name))}
    errors_of_ours = {name for name in classes if issubclass(getattr(ckptd_client, name), ckptd_client.CkptdError)}
    assert [name for name in sorted(classes - errors_of_ours) if not re.search(rf"\b{name}s?\b", others[name])] == []


def classes_in(hint):
    """All classes of a hint and of its arguments."""
    if inspect.isclass(hint) and not typing.get_args(hint):
        yield hint
    for argument in typing.get_args(hint):
        yield from classes_in(argument)


def test_each_class_that_a_call_returns_can_be_imported_from_where_users_import():
    shown = {one for _, one in public() if inspect.isclass(one)}
    returned = {
        (name, one) for name, found in public() for one in classes_in(dict(types_of(found) or {}).get("return"))
    }
    ours = {(name, one.__name__) for name, one in returned if one.__module__.startswith("ckptd") and one not in shown}
    assert {name for name, _ in ours} <= {"SafetensorsFile.lay_out", "TorchFile.lay_out"}, "save_files alone calls them"
    assert ("Client.save", ckptd_client.SaveHandle) in returned


def types_of(found):
    found = found.fget if isinstance(found, property) else found
    return typing.get_type_hints(found) if inspect.isfunction(found) else ""
