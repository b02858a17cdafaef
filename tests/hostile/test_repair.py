"""What rebuild believes of sizes is held against what lies there, before it makes or writes anything."""

import os
import tempfile

import pytest

from ckptd.checkpoint.repair.run import rebuild
from ckptd.shared.base.errors import CkptdError
from ckptd.shared.format.manifest import decode_vote
from ckptd.system.files import FileLayer
from tests.hostile import forge
from tests.hostile.apart import apart
from tests.parity_store import Made

pytestmark = pytest.mark.timeout(120)
HUGE = 2_200_000_000_000 // 4096 * 4096


@pytest.fixture
def made(tmp_path):
    with tempfile.TemporaryDirectory(prefix="ckptd-test-", dir="/dev/shm") as arenas:
        os.makedirs(tmp_path / "store" / "demo")
        yield Made(tmp_path / "store", arenas, [[50_000], [80_001, 3], [33_333]]).commit()


def edit_parity(final, number, **said):
    forge.edit_vote(final, number, lambda vote: vote["parity"].update(said))


def parity_of(final, number):
    manifest = forge.manifest_of(final)
    return decode_vote((final / manifest.place_of(manifest.votes[number])).read_bytes(), where="forge").parity


def bounded(final):
    """A rebuild apart: it ends, in little memory, and makes no file that is larger than what it mends."""
    before = {path: path.stat().st_size for path in final.rglob("*") if path.is_file()}

    def run():
        outcome = rebuild(str(final))
        return f"{outcome.lost} {outcome.notes} {outcome.rebuilt}"

    came = apart(run)
    assert came.kind in ("", "ours"), came
    assert came.seconds < 2, came
    assert came.grown < 48 << 20, came
    after = {path: path.stat().st_size for path in final.rglob("*") if path.is_file()}
    assert max(after.values()) <= max(before.values()), after
    return came


@pytest.mark.parametrize("gone", [False, True])
def test_a_parity_that_is_said_to_be_huge(made, gone):
    parity = parity_of(made, 1)
    edit_parity(made, 1, nbytes=HUGE)
    if gone:
        os.unlink(made / parity.place)
    assert parity.name[:16] in bounded(made).text


def test_a_record_that_is_said_to_be_huge(made):
    edit_parity(made, 1, record_nbytes=1 << 30)
    bounded(made)


def test_all_parities_are_said_to_be_huge_and_an_image_is_gone(made):
    for number in range(len(forge.manifest_of(made).votes)):
        edit_parity(made, number, nbytes=HUGE)
    os.unlink(made / forge.records_of(made)[0].name)
    bounded(made)


def test_there_is_no_room_for_what_is_to_be_written(made, monkeypatch):
    """Told before, with the numbers, and nothing is begun."""
    name = forge.records_of(made)[0].name
    os.unlink(made / name)
    monkeypatch.setattr(FileLayer, "space", lambda _fs, _path: (4096, 1 << 40))
    with pytest.raises(CkptdError, match=r"needs .* free"):
        rebuild(str(made))
    assert not [path for path in made.rglob(".*") if path.is_file()]
    monkeypatch.undo()
    assert rebuild(str(made)).rebuilt == [str(made / name)]
