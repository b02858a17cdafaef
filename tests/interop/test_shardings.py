"""Every way to shard that torch has, read to the bit by every reader there is.

FSDP2 over tensor parallelism, rows that do not divide, ranks without rows, shards of several boxes, replicas, optimizer
state by name and by number.

FAULTS=long adds worlds.
"""

import json
import os

import pytest
import torch
from safetensors import safe_open

from ckptd.checkpoint.verify import verify_path
from ckptd.shared.torchfile.image import FILLER_PREFIX
from tests.cluster import Node
from tests.interop.launch import on_ranks
from tests.interop.mesh_ranks import JOB
from tests.long_form import in_long
from tests.unit.client.same import bits

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

SCRIPT = "mesh_ranks.py"
SAVED = {"tp": 4, "hsdp": 4, "ddp": 2}  # layout: ranks
LOADS = [("tp", 4, "tp"), ("tp", 2, "fsdp"), ("ddp", 3, "fsdp")]
MORE = [
    ("tp", 1, "fsdp"), ("hsdp", 2, "ddp"),
    ("hsdp", 4, "hsdp,tp"), ("hsdp", 3, "fsdp"), ("ddp", 2, "fsdp"), ("tp", 3, "fsdp,ddp"), ("ddp", 4, "fsdp,tp,hsdp"),
    ("tp", 4, "fsdp"), ("tp", 2, "ddp"),
]  # fmt: skip


@pytest.fixture(scope="module")
def saved(request, tmp_path_factory):
    """(node, folder with the reference, layout, directory of the checkpoint): a store for each layout."""
    folder = str(tmp_path_factory.mktemp(request.param))
    with Node(folder) as node:
        node.start()
        on_ranks(node, SAVED[request.param], SCRIPT, "save", folder, request.param)
        reference = torch.load(f"{folder}/{request.param}.pt", weights_only=True)
        yield node, folder, request.param, os.path.join(node.store, JOB, reference["dirname"])


def assembled(directory):
    """{name: whole tensor} by nothing but safetensors, and how often each element was written."""
    shapes, boxes = {}, []
    for file in sorted(name for name in os.listdir(directory) if name.endswith(".safetensors")):
        with safe_open(os.path.join(directory, file), "pt") as opened:
            places = json.loads(opened.metadata()["DCP_SHARDING_INFO"])
            for name in opened.keys():  # noqa: SIM118 - no mapping
                if not name.startswith(FILLER_PREFIX):
                    part, at = opened.get_tensor(name), places[name]["saved_offsets"]
                    ends = [o + n for o, n in zip(at, part.shape, strict=True)]
                    shapes[name] = [max(pair) for pair in zip(ends, shapes.get(name, ends), strict=True)]
                    boxes.append((name, at, ends, part))
    whole = {name: torch.empty(shape) for name, shape in shapes.items()}
    count = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()}
    for name, at, ends, part in boxes:
        where = tuple(map(slice, at, ends))
        whole[name] = whole[name].to(part.dtype)
        whole[name][where] = part
        count[name][where] += 1
    return whole, count


@pytest.mark.parametrize("saved", SAVED, indirect=True)
def test_the_checkpoint_is_sound_and_safetensors_alone_has_every_element(saved):
    _, folder, layout, directory = saved
    report = verify_path(directory)
    assert report.ok, report.problems
    reference = torch.load(f"{folder}/{layout}.pt", weights_only=True)["whole"]
    whole, count = assembled(directory)
    assert whole.keys() == {name for name in reference if not name.startswith("own.")}  # that is tied to "optimizer"
    for name, tensor in whole.items():
        wanted = reference[name]
        assert bits(tensor) == bits(torch.view_as_real(wanted) if wanted.is_complex() else wanted), name
        assert (count[name] >= 1).all(), name
    several = any("-p01." in file for file in os.listdir(directory))
    assert several == (layout != "ddp")  # the shard of several boxes has a file for each
    if several:
        assert (count["loose.strided"] == 1).all()


@pytest.mark.parametrize(("saved", "ranks", "into"), [*LOADS, *in_long(*MORE)], indirect=["saved"])
def test_every_reader_gives_back_what_was_saved(saved, ranks, into):
    node, folder, layout, _ = saved
    on_ranks(node, ranks, SCRIPT, "load", folder, layout, into)


@pytest.mark.parametrize("saved", ["tp"], indirect=True)
def test_a_flipped_bit_in_a_later_file_of_an_image_is_named(saved):
    directory = saved[3]
    path = os.path.join(directory, "r00001-p03.safetensors")
    with open(path, "r+b") as file:
        before = file.read()
        try:
            file.seek(5000)
            file.write(bytes([before[5000] ^ 1]))
            file.flush()
            (problem,) = verify_path(directory).problems
        finally:
            file.seek(0)
            file.write(before)
    assert "r00001-p03.safetensors" in str(problem)
    os.rename(path, path + ".away")
    problems = [str(problem) for problem in verify_path(directory).problems]
    os.rename(path + ".away", path)
    assert f"{path}: missing" in problems
    assert verify_path(directory).ok
