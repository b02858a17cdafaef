"""What docs/operations.md shows of ``ckptd status``: from a real run, in the middle of a drain of 4 nodes x 2 ranks.

``python -m tests.faults.nodes.capture`` takes it anew and writes it there. Paths of the run, which nobody else has, are
replaced by those of a site; nothing else is.
"""

import pathlib
import re
import sys

from tests.cluster import ROOT, Node
from tests.faults.nodes.clusters import MB, Zygote, a_cluster, within

NAMES = ("gpu01", "gpu02", "gpu03", "gpu04")
STORE, ARENA = "/scratch/me/ckpt", "/dev/shm/ckptd-1000"
_SHARD_NBYTES = 48 * MB
_DRAIN_S = 6  # of a shard
_SETTINGS = {"CKPTD_PEER_TIMEOUT_S": "20", "CKPTD_LOG_LEVEL": "info"}
_BLOCK_RE = re.compile(r"(?<=<!-- status -->\n).*?(?=<!-- /status -->)", re.DOTALL)
_PAGE = pathlib.Path(ROOT) / "docs" / "operations.md"
_DRAINED = (0.45, 0.8)
_SHAPES = (  # what differs from run to run
    (r"[━─]+", "BAR"),
    (r"[▁▂▃▄▅▆▇█]+ +\d+ %", "LEVELS"),
    (r"\d+\.\d (?:B|[KMGT]iB)(?:/s)?", "SIZE"),
    (r"\d+ %", "SHARE"),
    (r"\b(?:\d+(?:\.\d+)?[dhms])+\b", "TIME"),
    (r"pid \d+", "pid N"),
    (r"limit .*", "limit"),
    (r" +", " "),
)


def in_readme() -> str:
    """The block as it stands there, without its fence and indents."""
    found = _BLOCK_RE.search(_PAGE.read_text(encoding="utf-8"))
    assert found, "the page has no status"
    return "\n".join(line.removeprefix("    ") for line in found[0].strip("\n").split("\n"))


def shape_of(text: str) -> list[str]:
    """Its lines without what is another time, size or number in each run."""
    for pattern, word in _SHAPES:
        text = re.sub(pattern, word, text)
    return [line.strip() for line in text.strip().split("\n")]


def taken(zygote: Zygote, shard_nbytes: int = _SHARD_NBYTES) -> str:
    """The command and what it prints, through a daemon that does not coordinate the job."""
    bandwidth = str(shard_nbytes // _DRAIN_S)
    with a_cluster(zygote, NAMES, CKPTD_DRAIN_BANDWIDTH=bandwidth, **_SETTINGS) as cluster:
        ranks = cluster.ranks([name for name in NAMES for _ in range(2)], "llama-7b", [shard_nbytes])
        ranks.connect()
        ranks.save(100, "protected", "durable")
        ranks.save(200, "protected")
        asked = cluster.nodes["gpu03"]
        _await_middle(asked)
        shown = asked.complete(sys.executable, "-m", "ckptd", "status", "--nodes", timeout_s=30)
        ranks.kill()
    return f"$ ckptd status --nodes\n{shown.replace(cluster.store, STORE).replace(asked.arena, ARENA).rstrip()}"


def _await_middle(node: Node) -> None:
    low, high = _DRAINED
    for _ in within(60, 0.05):
        job = node.job("llama-7b")
        total = sum(rank.drain_nbytes for rank in job.ranks) if job is not None else 0
        if job is not None and total and low < sum(rank.drain_nbytes_done for rank in job.ranks) / total < high:
            return


def main() -> None:
    """Writes it into the page."""
    zygote = Zygote()
    try:
        text = taken(zygote)
    finally:
        zygote.close()
    block = "\n".join(f"    {line}".rstrip() for line in text.split("\n"))
    page = _PAGE.read_text(encoding="utf-8")
    _PAGE.write_text(_BLOCK_RE.sub(lambda _: f"\n{block}\n\n", page), encoding="utf-8")
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    main()
