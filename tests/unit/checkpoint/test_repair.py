"""Checkpoints on the store lose files and bits, and get every one back from the parity beside them, or say why not."""

import itertools
import os
import random
import sys
import tempfile

import pytest

from ckptd.checkpoint.repair.run import rebuild
from ckptd.checkpoint.verify import verify_path
from ckptd.cli import invoke
from ckptd.shared.base.errors import CkptdError, UsageError
from ckptd.shared.format.digest import BLOCK_NBYTES
from ckptd.shared.format.manifest import COMMITTED
from ckptd.shared.format.schemes import Scheme
from tests import pythons
from tests.cluster import ROOT
from tests.flips import flip
from tests.parity_store import Made
from tests.runs import manifest_in

KIB, MIB = 1 << 10, 1 << 20
SMALL = [[50_000], [80_001, 3], [33_333]]


@pytest.fixture
def arenas():
    with tempfile.TemporaryDirectory(prefix="ckptd-test-", dir="/dev/shm") as directory:
        yield directory


def files_of(final):
    return {str(path.relative_to(final)): path.read_bytes() for path in final.rglob("*") if path.is_file()}


def identities(final):
    return {str(path.relative_to(final)): path.stat().st_ino for path in final.rglob("*") if path.is_file()}


def images(final):
    return sorted(path.name for path in final.glob("*.safetensors"))


def parities(final):
    """Places of all parity files, by member."""
    return [str(path.relative_to(final)) for path in sorted(final.glob("sets/*/*.parity"))]


def mended(final, before, damage, *, verify=True):
    """Damages, rebuilds, and looks that all is as before and that nothing else was written."""
    kept = identities(final)
    concerned = set(damage(final))
    outcome = rebuild(str(final))
    assert outcome.lost == []
    assert {os.path.relpath(path, final) for path in outcome.rebuilt} == concerned
    assert files_of(final) == before
    now = identities(final)
    assert all(now[name] == kept[name] for name in before if name not in concerned)
    again = rebuild(str(final))
    assert (again.damaged, again.rebuilt) == ([], [])
    assert verify_path(str(final)).ok or not verify


def lose(*names):
    def damage(final):
        for name in names:
            os.unlink(final / name)
        return names

    return damage


def test_drained_parity_is_listed_checked_and_needed_by_no_reader(tmp_path, arenas):
    final = Made(tmp_path, arenas, SMALL).commit()
    report = verify_path(str(final))
    assert report.ok, report.problems
    assert (report.files, len(parities(final))) == (4 + 1 + 3, 3)
    outcome = rebuild(str(final))
    assert (outcome.damaged, outcome.rebuilt, outcome.lost) == ([], [], [])
    flip(final / parities(final)[1], 9)
    report = verify_path(str(final))
    assert [(p.path, p.block) for p in report.problems] == [(str(final / parities(final)[1]), 0)]


@pytest.mark.parametrize(
    ("sizes", "scheme"),
    [
        (SMALL, Scheme.XOR),
        ([[40_000], [40_000]], Scheme.XOR),
        ([[100_000], [7, 250_000], [90_000], [1000, 1, 60_000]], Scheme.DOUBLE),
        ([[9 * 4096 + 1]] * 6, Scheme.DOUBLE),
        ([[60_000]] * 3, Scheme.DOUBLE),
    ],
    ids=str,
)
def test_the_files_of_every_node_that_the_scheme_bears(tmp_path, arenas, sizes, scheme):
    """All images of a node and its parity at once."""
    final = Made(tmp_path, arenas, sizes, scheme).commit()
    before, ranks = files_of(final), itertools.count()
    names = [[f"r{next(ranks):05d}-p00.safetensors" for _ in own] for own in sizes]
    for count in range(1, scheme.losses + 1):
        for lost in itertools.combinations(range(len(sizes)), count):
            gone = [name for member in lost for name in names[member]]
            gone += [name for i, name in enumerate(parities(final)) if i in lost]
            mended(final, before, lose(*gone))


def test_large_images_are_mended_block_by_block(tmp_path, arenas):
    """Bits in different images and in parity: more files than the scheme bears, but nowhere two of a group."""
    sizes = [[BLOCK_NBYTES + 5 * MIB], [BLOCK_NBYTES + 4099], [BLOCK_NBYTES + 9]]
    final = Made(tmp_path, arenas, sizes).commit()
    before = files_of(final)

    def damage(final):
        flip(final / "r00000-p00.safetensors", BLOCK_NBYTES + 77)
        flip(final / "r00002-p00.safetensors", 5)
        with open(final / "r00001-p00.safetensors", "ab") as file:
            file.write(b"more")
        return images(final)

    mended(final, before, damage)

    def cut(final):
        os.truncate(final / "r00001-p00.safetensors", BLOCK_NBYTES + 5)
        return ["r00001-p00.safetensors"]

    mended(final, before, cut)
    mended(final, before, lose("r00000-p00.safetensors"))


@pytest.mark.parametrize("member", [0, 1, 2])
def test_a_bit_in_parity_and_all_of_it(tmp_path, arenas, member):
    final = Made(tmp_path, arenas, SMALL).commit()
    before = files_of(final)
    name = parities(final)[member]
    nbytes = len(before[name])
    for at in (0, nbytes // 3, nbytes - 1):

        def damage(final, at=at):
            flip(final / name, at)
            return [name]

        mended(final, before, damage)
    mended(final, before, lose(name))


def test_an_image_of_several_files(tmp_path, arenas):
    parts = {1: (3 * BLOCK_NBYTES // 2, 4096, 0)}  # the last has the rest
    final = Made(tmp_path, arenas, [[1000], [2 * BLOCK_NBYTES], [5000]], parts=parts).commit()
    before, names = files_of(final), [f"r00001-p{part:02d}.safetensors" for part in range(3)]
    assert set(names) <= set(before)
    for gone in (names, names[:1], names[1:2], names[2:]):
        kept = identities(final)
        lose(*gone)(final)
        outcome = rebuild(str(final))
        assert sorted(os.path.basename(path) for path in outcome.rebuilt) == sorted(gone)
        assert files_of(final) == before
        assert all(identities(final)[name] == kept[name] for name in before if name not in gone)


def test_more_than_the_scheme_bears_is_refused_by_name_and_nothing_touched(tmp_path, arenas, capsys):
    final = Made(tmp_path, arenas, [[50_000]] * 3).commit()
    lose("r00000-p00.safetensors", "r00002-p00.safetensors")(final)
    left = files_of(final)
    kept = identities(final)
    assert invoke(["rebuild", str(final)]) == 1
    text = capsys.readouterr().out
    for name in ("r00000-p00.safetensors", "r00002-p00.safetensors"):
        assert f"lost: {final}/{name}: its set of 3 nodes bears the loss of 1 (xor) and lacks" in text
    assert "2 cannot be" in text
    assert (files_of(final), identities(final)) == (left, kept)


def test_without_parity_it_says_so(tmp_path, arenas):
    path = Made(tmp_path, arenas, SMALL).commit(parity=False)
    assert rebuild(str(path)).damaged == []
    lose("r00000-p00.safetensors")(path)
    with pytest.raises(CkptdError, match=r"r00000-p00.safetensors: damaged or missing, and no parity was drained"):
        rebuild(str(path))


def test_what_is_no_checkpoint_is_reported(tmp_path, arenas):
    with pytest.raises(UsageError, match="no checkpoint's directory"):
        rebuild(str(tmp_path))
    final = Made(tmp_path, arenas, SMALL).commit()
    flip(manifest_in(final), 50)
    with pytest.raises(CkptdError, match=r"ckptd\..*manifest"):
        rebuild(str(final))
    os.unlink(final / COMMITTED)
    with pytest.raises(CkptdError, match="not committed"):
        rebuild(str(final))


def damaged_vote(final, member):
    """Its path; gone or of other bytes."""
    (vote,) = final.glob(f"sets/*/n{member}.*.vote")
    flip(vote, 40) if member else os.unlink(vote)
    return str(vote)


@pytest.mark.parametrize("member", [0, 1])
def test_beside_a_damaged_vote_the_rest_is_mended(tmp_path, arenas, member):
    """Nothing else says what the files of its node should be: they are another node's that the set lacks."""
    final = Made(tmp_path, arenas, [[50_000], [80_001, 3], [33_333], [60_000]], Scheme.DOUBLE).commit()
    before = files_of(final)
    vote = damaged_vote(final, member)
    gone = ["r00004-p00.safetensors", parities(final)[3]]
    lose(*gone)(final)
    outcome = rebuild(str(final))
    assert {os.path.relpath(path, final) for path in outcome.rebuilt} == set(gone)
    assert {name: data for name, data in files_of(final).items() if name in gone} == {n: before[n] for n in gone}
    assert [lost.path for lost in outcome.lost] == [vote]
    ranks = ("rank 0", "ranks 1-2")[member]
    assert f"nothing else says what the images of {ranks} should be" in outcome.lost[0].what
    assert vote in outcome.damaged


def test_a_damaged_vote_counts_as_a_node_of_its_set(tmp_path, arenas, capsys):
    """One loss is what the scheme bears: what else is lost in the set is named, and why."""
    final = Made(tmp_path, arenas, SMALL).commit()
    vote = damaged_vote(final, 1)
    lose("r00003-p00.safetensors")(final)
    left = files_of(final)
    assert invoke(["rebuild", str(final)]) == 1
    text = capsys.readouterr().out
    assert f"lost: {vote}: is not the vote that" in text
    assert f"lost: {final}/r00003-p00.safetensors: its set of 3 nodes bears the loss of 1 (xor) and lacks" in text
    assert "what the vote of ranks 1-2 says" in text
    assert files_of(final) == left


@pytest.mark.parametrize("parity", [True, False])
def test_a_damaged_vote_alone_is_named(tmp_path, arenas, parity):
    """The images of the others are looked at."""
    final = Made(tmp_path, arenas, SMALL).commit(parity=parity)
    vote = damaged_vote(final, 1)
    outcome = rebuild(str(final))
    assert ([lost.path for lost in outcome.lost], outcome.rebuilt) == ([vote], [])
    assert outcome.nbytes > 80_000


POINTS = ["rebuild.half-pulled", "repair.file-unsynced", "repair.before-file-rename", "repair.after-file-rename"]


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_any_point_it_leaves_nothing_that_counts(tmp_path, arenas, point):
    final = Made(tmp_path, arenas, SMALL).commit()
    before = files_of(final)
    lose("r00001-p00.safetensors", "r00002-p00.safetensors")(final)
    broken = files_of(final)
    done = pythons.run(
        [sys.executable, "-m", "ckptd", "rebuild", str(final)], check=False, capture_output=True, timeout=120,
        env=os.environ | {"CKPTD_FAILPOINT": point, "PYTHONPATH": f"{ROOT}:{ROOT}/client"},
    )  # fmt: skip
    assert done.returncode == -9, done.stderr
    left = {name: data for name, data in files_of(final).items() if ".tmp-" not in name}
    if point == "repair.after-file-rename":
        assert left.items() > broken.items()
        assert left.items() < before.items()
    else:
        assert left == broken
    assert rebuild(str(final)).lost == []
    assert files_of(final) == before


def test_any_damage_is_mended_to_the_bit_or_reported(tmp_path, arenas):
    """Many random damages: whatever comes out has its digests, and what did not is named."""
    final = Made(tmp_path, arenas, [[90_000], [50_000, 60_000], [80_000], [70_001]], Scheme.DOUBLE).commit()
    before, dice = files_of(final), random.Random(7)
    names = [*images(final), *parities(final)]
    for _ in range(25):
        chosen = dice.sample(names, dice.randint(1, 4))
        for name in chosen:
            if dice.random() < 0.5:
                os.unlink(final / name)
            else:
                flip(final / name, dice.randrange(len(before[name])))
        outcome = rebuild(str(final))
        lost = {os.path.relpath(one.path, final) for one in outcome.lost}
        now = files_of(final)
        assert all(now.get(name) == before[name] for name in before if name not in lost), chosen
        assert lost <= set(chosen)
        for name in lost:
            (final / name).write_bytes(before[name])
    assert verify_path(str(final)).ok
