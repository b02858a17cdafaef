"""Names on the store with a number of an incarnation that no life of the job can have had: reported, and ignored."""

import os
import shutil

import pytest
import torch

import ckptd_client
from ckptd.shared.base.errors import CkptdError
from ckptd.shared.base.ids import MAX_INCARNATION, JobKey, SaveId
from ckptd.store.facts import Committer, Taker
from ckptd.store.posix.scan import scan
from ckptd.system.files import FileLayer
from tests.checkpoints import write_checkpoint
from tests.cluster import Node
from tests.records import take, taken_over_by
from tests.runs import RUN, STORE_ID

pytestmark = pytest.mark.timeout(120)
TAKER = Taker(RUN, "session", "node")
LAST = SaveId(MAX_INCARNATION, 1, 10, RUN)
NAMES = {
    "a marker": f".incarnations/i{MAX_INCARNATION:08d}",
    "a directory's marker": f".incarnations/i{MAX_INCARNATION:08d}/",
    "a checkpoint's name": f"{LAST.dirname}/",
    "an unfinished one's name": f"{LAST.partial_dirname}/",
}


def put(store, name):
    path = os.path.join(store, "demo", NAMES[name])
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if not path.endswith("/"):
        with open(path, "wb"):
            pass


@pytest.mark.parametrize("name", NAMES)
def test_the_next_number_is_counted_from_what_is_plausible(tmp_path, name):
    key, fs = JobKey(str(tmp_path), "demo"), FileLayer()
    write_checkpoint(tmp_path, [{"w": torch.ones(2)}], save=SaveId(4, 1, 10, RUN))
    put(tmp_path, name)
    assert [take(fs, key, TAKER) for _ in range(3)] == [5, 6, 7]
    problems = "\n".join(scan(fs, key).strange)
    assert f"{MAX_INCARNATION}" in problems
    assert os.path.basename(NAMES[name].rstrip("/")) in problems
    save = SaveId(7, 1, 20, RUN)
    assert taken_over_by(fs, key, save, Committer(7, "session", STORE_ID)) == 0  # nobody began a life with that number
    assert LAST not in [partial.save for partial in scan(fs, key).partials]


def test_a_checkpoint_with_its_record_counts_whatever_its_number(tmp_path):
    key, fs = JobKey(str(tmp_path), "demo"), FileLayer()
    write_checkpoint(tmp_path, [{"w": torch.ones(2)}], save=SaveId(MAX_INCARNATION - 2, 1, 10, RUN))
    assert take(fs, key, TAKER) == MAX_INCARNATION - 1
    assert take(fs, key, TAKER, at_least=MAX_INCARNATION) == MAX_INCARNATION
    for _ in range(2):  # and never for ever
        with pytest.raises(CkptdError, match="used up"):
            take(fs, key, TAKER, at_least=MAX_INCARNATION)


@pytest.mark.parametrize("name", NAMES)
def test_a_job_starts_saves_and_loads_beside_it(tmp_path, name):
    os.mkdir(tmp_path / "store")
    with Node(str(tmp_path / "store")) as node:
        put(node.store, name)
        node.start()
        for step in (1, 2):
            state = {"w": torch.zeros(2)}
            with ckptd_client.connect("demo", store=node.store, arena=node.arena, start=False) as client:
                restored = client.load(state)
                assert (restored.step if restored else None) == (step - 1 or None)
                state["w"] += step
                assert client.save(state, step).wait("durable", 60) is not None
                assert str(MAX_INCARNATION) in "\n".join(node.job("demo").errors)
            assert state["w"].tolist() == [step * (step + 1) / 2] * 2
        assert sum("worker" in line for line in node.log_text().splitlines()) < 5
        assert node.daemon.poll() is None
    shutil.rmtree(tmp_path / "store")
