"""The cost of parity for training: the stall of a save while the one before is encoded, and without redundancy.

``python -m bench.redundancy``: two nodes on loopback, a rank on each; rank 0 is measured, while rank 1 waits, so that
a core is free. The two jobs take turns in the same processes. Nothing is drained.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ckptd_client
from bench.node import Node, scratch
from bench.states import realistic

BAR = 1.05
_MIB = 1 << 20
_SCHEMES = ("none", "xor")


def main() -> None:
    """Prints medians and the ratio; exits with 1 when the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="state of a rank")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--partner", nargs=3, metavar=("ARENA", "STORE", "RENDEZVOUS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.partner is not None:
        _partner(arguments.mib, arguments.repeat, *arguments.partner)
        return
    stalls, running = _measure(arguments.mib, arguments.repeat)
    medians = {scheme: statistics.median(values) for scheme, values in stalls.items()}
    ratio = medians["xor"] / medians["none"]
    for scheme, values in stalls.items():
        low, high = 1000 * min(values), 1000 * max(values)
        print(f"stall of a save, {scheme:<4}  {1000 * medians[scheme]:7.1f} ms  ({low:.1f} to {high:.1f})")
    print(f"the encode before was running when the save ended: {sum(running)} of {len(running)} times")
    print(f"ratio {ratio:.3f} x, bar {BAR} x: {'kept' if ratio <= BAR else 'MISSED'}")
    sys.exit(ratio > BAR)


def _measure(mib: int, repeat: int) -> tuple[dict[str, list[float]], list[bool]]:
    stalls: dict[str, list[float]] = {scheme: [] for scheme in _SCHEMES}
    running: list[bool] = []
    with scratch(Path(tempfile.gettempdir())) as (shm, disk):
        store = disk / "store"
        nodes = [_node(shm / name, store, name) for name in "ab"]
        rendezvous = str(disk / "rendezvous")
        command = [sys.executable, "-m", "bench.redundancy", "--mib", str(mib), "--repeat", str(repeat)]
        command += ["--partner", str(nodes[1].arena), str(store), rendezvous]
        partner = subprocess.Popen(command)
        try:
            clients = _connect(str(nodes[0].arena), str(store), rendezvous, 0)
            state = {"weights": realistic(mib * _MIB)}
            for client in clients.values():
                client.prepare(state)
            for step in range(repeat + 1):
                for scheme, client in clients.items():
                    stall, encoding = _one(client, state, step)
                    if step:
                        stalls[scheme].append(stall)
                        running += [encoding] if scheme == "xor" else []
            for client in clients.values():
                client.close()
            partner.wait(60)
        finally:
            partner.kill()
            partner.wait()
            for node in nodes:
                node.close()
    return stalls, running


def _one(client: ckptd_client.Client, state: dict[str, object], step: int) -> tuple[float, bool]:
    """Both ranks save; then rank 0 saves again at once, which is timed, and rank 1 after it."""
    dist.barrier()
    before = client.save(state, 2 * step)
    before.wait("staged", 60)
    after = client.save(state, 2 * step + 1)
    encoding = before.milestone != "protected"
    dist.barrier()
    after.wait("staged", 60)
    dist.barrier()
    time.sleep(0.5)  # the parity of both is made, or dropped
    return after.stall_s, encoding


def _partner(mib: int, repeat: int, arena: str, store: str, rendezvous: str) -> None:
    """Runs rank 1."""
    clients = _connect(arena, store, rendezvous, 1)
    state = {"weights": realistic(mib * _MIB)}
    for client in clients.values():
        client.prepare(state)
    for step in range(repeat + 1):
        for client in clients.values():
            dist.barrier()
            client.save(state, 2 * step)
            dist.barrier()
            client.save(state, 2 * step + 1).wait("staged", 60)
            dist.barrier()
    for client in clients.values():
        client.close()


def _connect(arena: str, store: str, rendezvous: str, rank: int) -> dict[str, ckptd_client.Client]:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    return {
        scheme: ckptd_client.connect(
            job=f"stall-{scheme}", arena=arena, store=store, redundancy=scheme, drain_every=10**6, start=False
        )
        for scheme in _SCHEMES
    }


def _node(directory: Path, store: Path, name: str) -> Node:
    directory.mkdir(mode=0o700)
    node = Node(directory, store)
    os.environ |= {"CKPTD_NODE": name, "CKPTD_PEER_ADDRESS": "127.0.0.1"}
    node.start()
    return node


if __name__ == "__main__":
    main()
