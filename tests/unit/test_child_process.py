"""Which copy of ckptd a process of it starts: its own, and nothing else of where that is installed."""

import os
import site

import ckptd
from ckptd.shared.files import child_process


def installed_in(folder, monkeypatch):
    monkeypatch.setattr(ckptd, "__file__", os.path.join(folder, "ckptd", "__init__.py"))


def test_a_copy_that_is_not_installed_comes_first(tmp_path, monkeypatch):
    installed_in(tmp_path, monkeypatch)
    monkeypatch.setenv("PYTHONPATH", "/of/the/user")
    assert child_process.environment()["PYTHONPATH"] == f"{tmp_path}{os.pathsep}/of/the/user"
    monkeypatch.delenv("PYTHONPATH")
    assert child_process.environment()["PYTHONPATH"] == str(tmp_path)


def test_packages_beside_an_installed_one_do_not_come_before_pythons_own(monkeypatch):
    installed_in(site.getsitepackages()[0], monkeypatch)
    monkeypatch.setenv("PYTHONPATH", "/of/the/user")
    assert child_process.environment()["PYTHONPATH"] == "/of/the/user"
    monkeypatch.delenv("PYTHONPATH")
    assert "PYTHONPATH" not in child_process.environment()
