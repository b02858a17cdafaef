"""The page of the charts, docs/charts.md: pictures, the same numbers in a table, the constants, what is left out."""

import re
import textwrap
from dataclasses import asdict

from bench.charts.figures import CHOSEN, MILESTONES, Data
from bench.measure import digits, markdown_table
from tests.simulation.costs import Costs
from tests.simulation.milestones import Times
from tests.simulation.scale import RANKS, SET_SIZE

PAGE = "charts.md"
_FLAT = 1.25  # so many times the least
_TEXT = """\
# Cost against the number of nodes

What a save and a restore take as a job grows from {least} to {most} nodes, in simulated jobs of real cores and links.
`make charts` measures the constants, plays the jobs and writes this page, its charts and
[their figures](charts/data.json); nothing on it is written by hand.

![Seconds to staged, protected, durable and restored, by nodes](charts/milestones.svg)

![The same without redundancy, with xor and with double](charts/schemes.svg)

Seconds from the call of `save` in all ranks until the last rank knows the milestone; restored: from the start of the
ranks' processes, after all of them crashed, until the last rank has read its state from its node's memory. {ranks}
ranks a node with {gib} GiB and {tensors} tensors each, redundancy sets of up to {set_size} nodes.

{table}

"connected" is the part of "restored" until all ranks are in. "coordinator" is how long the loop of the coordinator's
daemon was busy, in the save and in the restore: what of a time grows with the job grows there.

## Are the lines flat?

{flat}

{reasons}

## The constants

Measured in the same run, by the product's own code, on {machine}. CPU seconds of one thread, so that other work on the
machine counts less; taken on {taken}.

{measured}

Stated, not measured:

{stated}

In the play each copy, digest, encode and drain takes up to {slower} % longer than the fastest, by chance, as nodes do.
The daemons' cores are the real ones: the CPU time that each event takes in them is time of that daemon's loop. So
plays of one job differ from run to run, those of the largest most, by what else the machine does.

## What the simulator leaves out

- **The network's form.** Each node has a line of its own for parity, and all nodes may use theirs at once. Parity does
  not delay messages.
- **The store's limit.** Each node writes at the stated speed, however many there are: {most} nodes need a store of
  {store_total} GB/s. A store that is slower in all makes durable grow with the nodes; no other line depends on it.
- **Contention inside a node.** The copies of {ranks} ranks, the digests and the encode run at the speed of one core
  each, as if memory had room for all of them. GPUs are not in the play: a copy is from host memory.
- **The launcher.** Restored begins where the new processes do, 10 s or more after the crash: what a launcher needs to
  notice it and to start {ranks} processes a node is not ckptd's. In that time the coordinator's loop is busy for
  {crash} s with the end of all ranks of {most} nodes.
- **The store's latency.** A vote takes {vote_ms} ms and the commit its CPU time; records lie in memory.
- **Idle links.** Links that carry no message in the play are not played; each costs the coordinator 0.4 packets a
  second.
- **Encoding.** Messages are not encoded: they are charged by their size.

{absent}

## How to take them again

    make charts                                          # {default}
    make charts CHARTS="4 16 64"                         # fewer
    .venv/bin/python -m bench.charts --more 2000         # larger jobs, with the constants of the last run
    .venv/bin/python -m bench.charts --draw              # the page and its charts again, from the same figures

A play of {most} nodes takes {cpu_s} s of CPU and {memory} GiB of memory here. The costs are described in
[the decision](decisions/0049-simulated-daemons-take-time.md); `make scale` plays the same nodes against bars.
"""
DEFAULT = "4, 16, 64, 256 and 1,000 nodes, each scheme"


def markdown(data: Data) -> str:
    """The page."""
    most = data.sizes[-1]
    largest = [one for one in data.plays if one.nodes == most]
    stated = data.stated
    return _wrapped(_TEXT.format(
        least=data.sizes[0],
        most=f"{most:,}",
        ranks=RANKS,
        gib=f"{stated.nbytes / 2**30:g}",
        tensors=stated.tensors,
        set_size=SET_SIZE,
        table=_table(data),
        flat=_flat(data),
        reasons=_reasons(data),
        machine=_machine(data),
        taken=data.taken,
        measured=_measured(data),
        stated=_stated(data),
        slower=f"{stated.slower * 100:g}",
        store_total=f"{most * stated.store_bytes_per_s / 1e9:,.0f}",
        vote_ms=20,
        crash=digits(max(one.crash_busy_s for one in largest)),
        absent=_absent(data),
        default=DEFAULT,
        cpu_s=digits(max(one.cpu_s for one in largest)),
        memory=digits(max(one.memory_nbytes for one in largest) / 2**30),
    ))  # fmt: skip


def _wrapped(text: str) -> str:
    """Paragraphs and items of lists in lines of 120 characters; tables, code and headings as they are."""
    blocks = [block for block in text.strip().split("\n\n") if block.strip()]
    return "\n\n".join(block if block.lstrip("\n")[0] in "|#! " else _filled(block) for block in blocks) + "\n"


def _filled(block: str) -> str:
    items = re.split(r"\n(?=- )", block.strip())
    return "\n".join(
        textwrap.fill(" ".join(item.split()), 120, subsequent_indent="  " if item.startswith("- ") else "")
        for item in items
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else digits(value)


def _table(data: Data) -> str:
    columns = ["nodes", "redundancy", *MILESTONES.values(), "connected", "coordinator"]
    rows = [
        [
            f"{one.nodes:,}", one.scheme, *(_seconds(getattr(one, what)) for what in MILESTONES),
            _seconds(one.connected_s), f"{digits(one.save_busy_s)} + {digits(one.restore_busy_s)}",
        ]
        for one in data.plays
    ]  # fmt: skip
    return markdown_table(columns, rows)


def _flat(data: Data) -> str:
    """A line for each milestone of the chosen scheme."""
    plays = data.of(CHOSEN)
    lines = [f"With {CHOSEN}, from {plays[0].nodes:,} to {plays[-1].nodes:,} nodes:\n"]
    for what, label in MILESTONES.items():
        times = [(getattr(one, what), one.nodes) for one in plays]
        (least, few), (most, many) = min(times), max(times)
        said = "flat" if most <= _FLAT * least else "not flat"
        lines.append(
            f"- **{label}** is {said}: {digits(least)} s ({few:,} nodes) to {digits(most)} s ({many:,} nodes)."
        )
    return "\n".join(lines)


def _reasons(data: Data) -> str:
    first, last = data.of(CHOSEN)[0], data.of(CHOSEN)[-1]
    commits = {nodes: data.constants.commit[str(nodes)] for nodes in data.sizes}
    dearest = max(commits, key=lambda nodes: commits[nodes])
    return f"""\
What a node does for its own bytes (copy, digests, parity inside its set, drain) does not depend on the number of nodes,
but for the set: {first.nodes:,} nodes make one set, and larger jobs have sets of {SET_SIZE}, which cost a little more
to encode. Double pulls two bytes for each of xor, and XORs them more often. A restore from memory needs no parity.

What grows is the coordinator's: one loop takes messages of each node. In the save of {last.nodes:,} nodes it was busy
for {digits(last.save_busy_s)} s, of {first.nodes:,} for {digits(first.save_busy_s)} s: staged is later by a part of
that, and for the rest the loop works while nodes encode and drain. In the restore it was busy for
{digits(last.restore_busy_s)} s and {digits(first.restore_busy_s)} s: it learns of each rank and of what each memory
holds, and nothing else is under way. {_again(last)}

Durable also has the commit, which reads the votes of all nodes: {digits(commits[first.nodes])} s for {first.nodes:,}
nodes, {digits(commits[dearest])} s for {dearest:,}, the dearest here, and {digits(commits[last.nodes])} s for
{last.nodes:,}. Most of it is DCP's `.metadata`, which has each box of each tensor; above a million boxes there is none
([client](client.md)), so that the commit of a still larger job is cheap."""


def _again(last: Times) -> str:
    """What a loop that is behind costs itself."""
    if last.again < last.packets / 100:
        return ""
    return (
        f"All nodes report at once, the loop falls behind, and their links send again what it has not acknowledged"
        f" yet: {last.again:,} of the {last.packets:,} packets that it took were such."
    )


def _machine(data: Data) -> str:
    about = data.machine
    return (
        f"{about['cores']} cores, {about['memory_gib']} GiB, Linux {about['kernel']}, Python {about['python']}, torch"
        f" {about['torch']}; load when the run began: {about['load']}"
    )


def _measured(data: Data) -> str:
    found = data.constants
    rows = [
        ["packet taken from a link, with its message", f"{found.packet_in_s * 1e6:.1f} us"],
        ["packet handed to a link, with its message", f"{found.packet_out_s * 1e6:.1f} us"],
        [
            "byte of a message decoded; encoded",
            f"{found.decode_byte_s * 1e9:.1f} ns; {found.encode_byte_s * 1e9:.1f} ns",
        ],
        ["`save`: state into a slot, plan and seal", _speed(found.copy_bytes_per_s)],
        ["`load` from memory: digests and copy", _speed(found.read_bytes_per_s)],
        ["digests of a slot", _speed(found.digest_bytes_per_s)],
    ]
    for key, seconds in found.encode.items():
        scheme, _, members = key.partition("/")
        rows.append([
            f"parity, {scheme} in a set of {members}: pull, check, XOR, seal",
            f"{_speed(1 / seconds)} of the node's state, {found.pulled[key]:.2f} bytes pulled for each",
        ])  # fmt: skip
    rows += [
        [f"commit of {int(nodes):,} nodes, {int(nodes) * RANKS * data.stated.tensors:,} boxes", f"{digits(seconds)} s"]
        for nodes, seconds in found.commit.items()
    ]
    return markdown_table(["of one core", "measured"], rows)


def _speed(nbytes_per_s: float) -> str:
    return f"{digits(nbytes_per_s / 1e9)} GB/s"


def _stated(data: Data) -> str:
    stated, costs = data.stated, asdict(Costs())
    rows = [
        ["state of a rank", f"{stated.nbytes / 2**30:g} GiB, virtual: only its time is played"],
        ["tensors of a rank", str(stated.tensors)],
        ["line of a node, for parity, each way", _speed(stated.line_bytes_per_s)],
        ["the same, for messages", _speed(costs["bytes_per_s"])],
        ["delay of a packet", f"{costs['delay_s'] * 1e3:g} ms"],
        ["store, for each node", _speed(stated.store_bytes_per_s)],
        ["request of a rank, reply to it", f"{costs['rank_s'] * 1e6:g} us"],
        ["another event or action of a daemon, beside its core", f"{costs['local_s'] * 1e6:g} us"],
        ["handshake, each side", f"{costs['handshake_s'] * 1e6:g} us"],
        ["ranks call at the same time, but for", "20 ms"],
    ]
    return markdown_table(["constant", "value"], rows)


def _absent(data: Data) -> str:
    return "" if data.sizes[-1] >= LARGEST else ABSENT


LARGEST = 10_000
ABSENT = """\
Jobs of 4,000 and 10,000 nodes are not in the charts: a play's CPU time and memory, which stand below, grow with the
square of the nodes, since each of them knows all others, and 4,000 nodes need some 16 times those of 1,000."""
