"""Keyed digests through the life of a checkpoint on several nodes: staged, protected, durable, back by each tier."""

import glob
import os

import pytest

from ckptd.cli import invoke
from ckptd.shared.files.integrity_key import write_key
from ckptd.shared.format.integrity import KEYED_KIND
from ckptd.shared.format.manifest import decode_manifest
from ckptd.shared.format.slot import SEALS_NBYTES, decode_seals
from tests.faults.nodes.clusters import KB, a_cluster
from tests.runs import manifest_in
from tests.stored import parity_of

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240), pytest.mark.xdist_group("nodes-integrity")]
SIZES = (256 * KB, 512 * KB, 300 * KB)


def test_staged_protected_durable_and_back_by_each_tier(zygote, tmp_path, capsys):
    key = str(tmp_path / "key")
    integrity = write_key(key)
    settings = {"CKPTD_INTEGRITY_KEY_FILE": key, "CKPTD_DRAIN_PARITY": "true"}
    with a_cluster(zygote, "abc", **settings) as cluster:

        def connected(homes="abc"):
            ranks = cluster.ranks(homes, "job", sizes=SIZES)
            ranks.connect(integrity_key_file=key)
            return ranks

        def life(homes="abc"):
            ranks = connected(homes)
            return ranks, [found["tier"] for found in ranks.load()]

        ranks = connected()
        ranks.call("load")
        ranks.save(10, "staged", "protected", "durable")
        for node in cluster.nodes.values():
            for path in node.slots():
                with open(path, "rb") as file:
                    file.seek(-SEALS_NBYTES, os.SEEK_END)
                    assert decode_seals(file.read(), integrity)[2].key_id in ("", integrity.key_id)
        ranks.kill()

        ranks, tiers = life()
        assert tiers == ["arena"] * 3
        ranks.kill()
        ranks, tiers = life("bac")
        assert sorted(tiers) == ["arena", "peer", "peer"], tiers
        ranks.kill()
        cluster.replace("b")
        ranks, tiers = life()
        assert "rebuilt" in tiers or "peer" in tiers, tiers
        ranks.save(20, "staged", "protected", "durable")
        ranks.kill()
        cluster.replace("c")
        ranks, tiers = life()
        assert tiers == ["arena", "arena", "rebuilt"], tiers
        ranks.kill()
        for name in "abc":
            cluster.replace(name)
        ranks, tiers = life()
        assert tiers == ["pfs"] * 3
        cluster.end(ranks)

        final = max(glob.glob(os.path.join(cluster.store, "job", "step-*")))
        manifest = decode_manifest(manifest_in(final).read_bytes(), where="manifest", integrity=integrity)
        assert (manifest.digest_kind, manifest.key_id) == (KEYED_KIND, integrity.key_id)
        assert len(parity_of(final, integrity)) == 3
        assert invoke(["verify", "--key", key, final]) == 0
        lost = os.path.join(final, "r00001-p00.safetensors")
        with open(lost, "r+b") as file:
            file.seek(70_000)
            file.write(b"forged")
        assert invoke(["verify", "--key", key, final]) == 1
        assert invoke(["rebuild", "--key", key, final]) == 0, capsys.readouterr()
        assert invoke(["verify", "--key", key, final]) == 0


def test_ranks_whose_nodes_have_other_keys_find_out_at_connect(zygote, tmp_path):
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    write_key(one)
    write_key(other)
    with a_cluster(zygote, "a", CKPTD_INTEGRITY_KEY_FILE=one) as cluster:
        cluster.add("b", CKPTD_INTEGRITY_KEY_FILE=other)
        ranks = cluster.ranks("ab", "job", sizes=SIZES)
        for rank, key in zip(ranks.all, (one, other), strict=True):
            rank.start("connect", "job", integrity_key_file=key)
        with pytest.raises(Exception, match="ranks disagree: rank 0 and its daemon have integrity keyed:"):
            ranks.results()
