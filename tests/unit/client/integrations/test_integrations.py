"""The integrations where no framework is installed, and where one is too old."""

import pathlib
import subprocess
import sys

import pytest

import ckptd_client.integrations
from ckptd.shared.base.errors import UsageError
from ckptd_client.integrations._kit.framework import Framework
from ckptd_client.integrations._kit.options import connect_with

FOLDER = pathlib.Path(ckptd_client.integrations.__file__).parent
MODULES = sorted(f"ckptd_client.integrations.{path.stem}" for path in FOLDER.glob("*.py"))
FRAMEWORKS = ("accelerate", "deepspeed", "lightning", "megatron", "transformers")


def test_the_client_imports_no_integration_and_each_is_imported_without_its_framework():
    code = (
        "import importlib, sys, ckptd_client\n"
        "print(*(name for name in sys.modules if '.integrations' in name))\n"
        f"sys.modules.update(dict.fromkeys({FRAMEWORKS!r}))\n"
        "for module in sys.argv[1:]: importlib.import_module(module)"
    )
    command = [sys.executable, "-c", code, *MODULES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_what_is_missing_says_what_to_install():
    absent = Framework("A framework", "no-such-framework", "1.2")
    with pytest.raises(UsageError, match="A framework is not installed") as caught:
        absent.module("no_such_framework")
    assert caught.value.hint == "pip install 'no-such-framework>=1.2'"

    class Derived(absent.base("no_such_framework.parts", "Part")):
        def __init__(self, something):
            raise AssertionError("it was made")

    with pytest.raises(UsageError, match="not installed") as caught:
        Derived(1)
    assert caught.value.hint == "pip install 'no-such-framework>=1.2'"


def test_what_is_too_old_says_so():
    with pytest.raises(UsageError, match=r"pytest \d.* is too old: 1000\.1 or newer") as caught:
        Framework("pytest", "pytest", "1000.1").module("pytest")
    assert caught.value.hint == "pip install 'pytest>=1000.1'"


def test_what_is_installed_but_broken_says_what_python_says():
    with pytest.raises(UsageError, match=r"pytest\.nothing cannot be imported: No module named"):
        Framework("pytest", "pytest", "1").module("pytest.nothing")


@pytest.mark.parametrize("oldest", ["0", "9.2", "9.2.0", "9.2.0.0", "9.1.7"])
def test_releases_are_compared_by_their_numbers(oldest, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9.2.0rc1+cpu")
    assert Framework("pytest", "pytest", oldest).module("pytest") is pytest


def test_a_framework_that_is_there_gives_its_class():
    assert Framework("pytest", "pytest", "1").base("pytest", "MonkeyPatch") is pytest.MonkeyPatch


@pytest.mark.parametrize(("typed", "hint"), [("drain_evry", "drain_every?"), ("x", "job, store, arena")])
def test_an_option_that_is_none_is_named(typed, hint):
    with pytest.raises(UsageError, match=f"'{typed}' is no option") as caught:
        connect_with({"job": "j", typed: 1})
    assert hint in caught.value.hint
