"""Daemon and store worker are of the copy of ckptd that starts them, installed or not, whatever else is installed."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.cluster import Node

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__import__("ckptd").__file__)))
SAVE = """
import json, os, sys
copy, arena, store = sys.argv[1:]
sys.path[:0] = [copy]
import torch
import ckptd_client
from ckptd.shared.files import locks
from ckptd.shared.format.arena_paths import LOCK

def first_path(pid):
    with open(f"/proc/{pid}/environ", "rb") as file:
        pairs = dict(field.partition(b"=")[::2] for field in file.read().split(b"\\0"))
    return os.fsdecode(pairs[b"PYTHONPATH"]).partition(":")[0]

with ckptd_client.connect("demo", arena=arena, store=store) as client:
    client.save({"a": torch.zeros(3)}, 1).wait("durable", 60)
    daemon = locks.holder(os.path.join(arena, LOCK))
    children = []
    for thread in os.listdir(f"/proc/{daemon}/task"):
        with open(f"/proc/{daemon}/task/{thread}/children") as file:
            children += map(int, file.read().split())
    print(json.dumps([ckptd_client.__file__, *map(first_path, [daemon, *children])]))
"""


def test_a_copy_that_is_not_installed_starts_its_own_daemon_and_worker(tmp_path):
    for package in ("ckptd", "client/ckptd_client"):
        where = tmp_path / os.path.basename(package)
        shutil.copytree(os.path.join(ROOT, package), where, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "store").mkdir()
    with Node(str(tmp_path / "store")) as node:
        done = subprocess.run(
            [sys.executable, "-c", SAVE, str(tmp_path), node.arena, node.store],
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            capture_output=True, text=True, check=False, timeout=100,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    file, *paths = json.loads(done.stdout)
    assert file.startswith(str(tmp_path))
    assert paths == [str(tmp_path)] * 2, "the daemon's and its worker's"
