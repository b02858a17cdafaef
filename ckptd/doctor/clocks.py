"""Clocks that differ: of the store, and of the nodes of a job. Pure. No promise of ckptd needs a clock; people do."""

from collections.abc import Iterator

from ckptd.doctor.rules import Finding, Verdict
from ckptd.shared.protocol.status import Status
from ckptd.system import human

APART_S = 1.0
_FIX = "chronyc tracking, or timedatectl, on {}: ages, the history and its losses are wrong until clocks agree"


def judge_clocks(store_ahead_s: float | None, status: Status | None) -> Iterator[Finding]:
    """A finding for what is apart, or one for all that agree; none where nothing was compared."""
    found = {} if store_ahead_s is None else {"the store": store_ahead_s}
    for job in status.jobs if status is not None else ():
        for node in job.nodes:
            if node.report is not None and node.report.ahead_s is not None:
                found[node.node] = node.report.ahead_s
    differing = {who: seconds for who, seconds in found.items() if abs(seconds) > APART_S}
    for who, seconds in sorted(differing.items(), key=lambda one: -abs(one[1])):
        way = "ahead of" if seconds > 0 else "behind"
        detail = f"the clock of {who} is {human.duration(abs(seconds))} {way} this node's"
        where = "the server of the store and here" if who == "the store" else f"{who} and here"
        yield Finding("clocks", Verdict.WARN, detail, _FIX.format(where))
    if found and not differing:
        yield Finding("clocks", Verdict.OK, f"within {APART_S:g} s of this node's: {', '.join(sorted(found))}")
