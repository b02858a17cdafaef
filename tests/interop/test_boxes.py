"""Tensors of which a rank has several boxes, through DCP's plug-ins: on 4 ranks of 2 by 2, and resharded to 2 and 1.

FAULTS=long adds the one rank, and on each number the save of the other job.
"""

import os

import pytest
import torch

from ckptd.checkpoint.verify import verify_path
from tests.interop.box_ranks import JOB, STAGED
from tests.interop.launch import on_ranks
from tests.long_form import in_long

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

SCRIPT = "box_ranks.py"


@pytest.fixture(scope="module")
def saved(node):
    folder = os.path.join(node.store, "of-boxes")
    os.mkdir(folder)
    on_ranks(node, 4, SCRIPT, "save", folder)
    return folder


@pytest.mark.parametrize("job", [JOB, STAGED])
def test_each_box_has_a_file_of_the_image(job, node, saved):
    name = torch.load(f"{saved}/whole.pt", weights_only=True)["names"][job]
    directory = os.path.join(node.store, job, name)
    assert any("-p03." in file for file in os.listdir(directory))
    report = verify_path(directory)
    assert report.ok, report.problems


@pytest.mark.parametrize(
    ("ranks", "job"), [(4, JOB), (2, STAGED), *in_long((4, STAGED), (2, JOB), (1, JOB), (1, STAGED))]
)
def test_every_box_comes_back_by_every_reader(ranks, job, node, saved):
    on_ranks(node, ranks, SCRIPT, "load", saved, job)


def test_rows_that_dcp_misunderstands_are_refused(node):
    on_ranks(node, 4, SCRIPT, "refuse")
