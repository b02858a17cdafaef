"""What a commit costs of the processor grows with ranks times tensors, and no faster."""

import os
import time

import pytest

from ckptd.shared.base.ids import SaveId, file_name
from ckptd.shared.format import layout as lay
from ckptd.shared.format import manifest as man
from ckptd.shared.format.digest import KIND
from ckptd.shared.format.packed_layout import encode_layout, parted
from ckptd.shared.format.rank_members import members_of
from ckptd.shared.format.replica_attestations import Attestation, difference
from ckptd.shared.format.sealed_record import VERSION
from ckptd.shared.torchfile.dcp_metadata import MAX_BOXES, metadata_bytes
from tests.runs import RUN, SET, STORE_ID
from tests.stored import voted
from tests.unit.core.a_job import AJob

pytestmark = pytest.mark.seconds

LONG = os.environ.get("FAULTS") == "long"
SAVE = SaveId(1, 1, 10, RUN)
GROWTH = 8  # times as many ranks
LINEAR = 3 * GROWTH  # at most so many times the work; what grows with the square takes 64 times
ROWS = 4


def rows_of(rank: int, ranks: int, tensors: int) -> lay.Layout:
    """Some rows of each tensor, all of which every rank has some of."""
    names = [f"layers.{i}.w" for i in range(tensors)]
    boxes = [
        lay.TensorEntry(name, "F32", (ROWS * ranks, 8), (ROWS * rank, 0), (ROWS, 8), at + 64, 128, at, 256)
        for at, name in zip(range(4096, 4096 + 512 * tensors, 512), names, strict=True)
    ]
    return lay.Layout(
        version=lay.VERSION, file=file_name(rank), rank=rank, world_size=ranks, header_nbytes=4096,
        image_nbytes=1 << 30, plan_id="test", tensors=boxes, aliases={},
        paths={name: tuple(("k", step) for step in name.split(".")) for name in names},
    )  # fmt: skip


def metadata(ranks: int, tensors: int) -> float:
    layouts = [rows_of(rank, ranks, tensors) for rank in range(ranks)]
    began = time.process_time()
    data = metadata_bytes(layouts, {}, checkpoint_id="step-000000010.i0001", save_id="the save")
    assert data is not None
    return time.process_time() - began


def manifest(ranks: int, tensors: int) -> float:
    layout = parted(encode_layout(rows_of(0, ranks, tensors)), "x")._asdict()
    votes = []
    for rank in range(ranks):
        file = man.FileRecord(name=file_name(rank), rank=rank, nbytes=10, digests=b"d" * 16, leaves=b"v", **layout)
        vote = man.Vote(
            version=VERSION,
            digest_kind=KIND,
            store_id=STORE_ID,
            job="job",
            save=SAVE,
            node=f"n{rank}",
            folder=SET,
            world_size=ranks,
            files=[file],
        )
        votes.append(voted(vote))
    began = time.process_time()
    made = man.make_manifest(votes, save=SAVE, writer="test")
    assert man.decode_manifest(man.encode_record(made), where="x").files == ranks
    return time.process_time() - began


def attestations(ranks: int, tensors: int) -> float:
    members = members_of(range(ranks))
    said = {rank: (Attestation(members, b"c" * 8, b"w" + b"x" * 7),) for rank in range(ranks)}
    began = time.process_time()
    for _ in range(tensors):
        assert not difference(said)
    return time.process_time() - began


def coordinated(ranks: int) -> float:
    job = AJob(world=ranks).start()
    began = time.process_time()
    job.stage_all(SAVE)
    job.drain(SAVE)
    assert job.ends(SAVE) == ["durable"]
    return time.process_time() - began


@pytest.mark.parametrize(
    ("work", "ranks", "tensors"), [(metadata, 32, 32), (manifest, 32, 1000), (attestations, 32, 200)]
)
def test_work_does_not_grow_with_the_square_of_the_ranks(work, ranks, tensors):
    few = min(work(ranks, tensors) for _ in range(3))
    many = min(work(GROWTH * ranks, tensors) for _ in range(2))
    assert many < LINEAR * few + 0.05, (few, many)


def test_a_save_of_hundreds_of_ranks_takes_its_coordinator_a_moment():
    assert coordinated(300) < 10  # 0.2 s


@pytest.mark.skipif(not LONG, reason="a minute of the processor: FAULTS=long")
@pytest.mark.timeout(600)
def test_a_thousand_tensors_on_a_thousand_ranks():
    assert MAX_BOXES >= 1000 * 1000
    assert metadata(1000, 1000) < 120
    assert manifest(1000, 1000) < 60


def test_the_list_for_stock_readers_is_made_with_signs_of_life():
    """Of a million boxes it takes half a minute of a core: a commit that is silent for so long counts as hung."""
    ranks, tensors = 32, 64
    layouts = [rows_of(rank, ranks, tensors) for rank in range(ranks)]
    signs = []
    found = metadata_bytes(layouts, {}, checkpoint_id="c", save_id="s", alive=lambda: signs.append(1))
    assert found == metadata_bytes(layouts, {}, checkpoint_id="c", save_id="s")
    assert len(signs) == 3 * tensors, "of each tensor when it is looked at, described and placed"
