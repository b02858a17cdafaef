"""Reads checkpoints as one of our readers does, one after the other, and says on stdout what came of each.

    python reader.py READER [boxes] < directories, one per line

boxes: the state that they hold has a tensor in two boxes, so that the image is two files.

One line of JSON each: the error's class, its text, the seconds it took, and by how much memory grew at most. Memory
that nobody touches does not show there, so more than 1 GiB of new address space is refused by the system.
"""

import json
import os
import resource
import signal
import sys
import tempfile
import time
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from ckptd.checkpoint.export import run
from ckptd.checkpoint.export.run import Order
from ckptd.checkpoint.repair import run as repair
from ckptd.checkpoint.verify import verify_path
from ckptd.cli import invoke
from ckptd.shared.base.errors import CkptdError
from ckptd_client._load.foreign.load_from import load_from as read_into
from ckptd_client._load.rounds import read_checkpoint
from ckptd_client._local.rank import Group
from ckptd_client._state.tensors import Chunk
from ckptd_client.dcp import CkptdReader
from ckptd_client.dcp._boxes import Boxes

TIMEOUT_S = 20


class Hung(BaseException):
    """Nothing of ours may catch it."""


def some_state(boxes=None):
    """A state of everything: modules, optimizer, nested containers, leaves; twice the same on every call."""
    boxes = sys.argv[2:] == ["boxes"] if boxes is None else boxes
    torch.manual_seed(3)
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    plain = {"epoch": 3, "pair": [torch.arange(3), {"x": (1, "a")}], "none": None, "tied": model.weight}
    return {"model": model, "optimizer": optimizer, **plain} | ({"boxes": in_boxes()} if boxes else {})


def in_boxes():
    """Rows 0 and 1, and rows 2 to 4, each in memory of its own."""
    chunks = [Chunk((at, 0), (rows, 3), torch.arange(3.0 * rows).view(rows, 3)) for at, rows in ((0, 2), (2, 3))]
    return Boxes((5, 3), torch.float32, chunks)


def load(directory):
    state = some_state()
    fitted, _, notes = read_checkpoint(directory, state, group=Group(0, 1, "test"))
    fitted.finish(state)
    return "; ".join(notes)


def load_two(directory):
    """As rank 1 of a job of two: everything is resharded."""
    state = some_state()
    fitted, _, notes = read_checkpoint(directory, state, group=Group(1, 2, "test"))
    fitted.finish(state)
    return "; ".join(notes)


def load_from(directory):
    """client.load_from, without its client."""
    return "; ".join(read_into(directory, some_state(), Group(0, 1, "test"))[3])


def plugin(directory):
    """CkptdReader. What DCP itself refuses, since the reader does not offer it, names the tensor, not the directory."""
    try:
        dcp.load(some_state(), storage_reader=CkptdReader(directory), no_dist=True)
    except CheckpointException as error:
        cause = error.failures[0][0]
        if isinstance(cause, CkptdError):
            raise cause from error
        if type(cause) in (RuntimeError, ValueError) and "in checkpoint state_dict" in str(cause):
            raise RefusedError(f"{directory}: {cause}") from error
        # DCP makes text of what read_metadata raises; a file that cannot be read is named as Python names it.
        if isinstance(cause, OSError) or (type(cause) is AssertionError and "metadata read failed" in str(cause)):
            raise RefusedError(str(cause)) from error
        raise cause from error
    return ""


class RefusedError(CkptdError):
    """Of a verb that tells its findings instead of raising."""


def verify(directory):
    report = verify_path(directory)
    if report.problems:
        raise RefusedError("\n".join(map(str, report.problems)))
    assert report.ok
    return ""


def listing(directory):
    """The verb itself, its table to nowhere."""
    from ckptd.cli.listing import _listing  # noqa: PLC0415
    from ckptd.store.opening import jobs_at  # noqa: PLC0415

    (job,) = jobs_at(os.path.dirname(directory))
    code = invoke(["list", os.path.dirname(directory)])
    problems = _listing(job).problems
    assert code == int(bool(problems)), code
    if problems:
        raise RefusedError("\n".join(problems))
    return ""


def export(directory, form="torch"):
    """To a place that goes away again."""
    with tempfile.TemporaryDirectory(prefix="ckptd-hostile-") as folder:
        try:
            run.export(Order(source=directory, out=f"{folder}/out", format=form))
        except OSError as error:
            raise RefusedError(str(error)) from error  # names the file; the verb says the same
    return ""


def export_dcp(directory):
    """With the plain values, from the votes."""
    return export(directory, "dcp")


def rebuild(directory):
    """Which finds nothing to do, or mends; without parity there is little that it can."""
    try:
        outcome = repair.rebuild(directory)
    except OSError as error:
        raise RefusedError(str(error)) from error
    if outcome.damaged:
        raise RefusedError("\n".join(outcome.damaged))
    return "; ".join(outcome.notes)


READERS = {
    "rebuild": rebuild,
    "load": load,
    "load_two": load_two,
    "load_from": load_from,
    "plugin": plugin,
    "verify": verify,
    "list": listing,
    "export": export,
    "export_dcp": export_dcp,
}


def peak_nbytes():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))


def reset_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def hung(_number, _frame):
    raise Hung


def attempt(read, directory):
    reset_peak()
    before, began = peak_nbytes(), time.perf_counter()
    signal.alarm(TIMEOUT_S)
    try:
        kind, text = "", read(directory)
    except CkptdError as error:
        kind, text = "CkptdError", str(error)
    except BaseException as error:
        kind, text = type(error).__name__, repr(error)
    signal.alarm(0)
    return {"kind": kind, "text": text, "seconds": time.perf_counter() - began, "grown": peak_nbytes() - before}


def main():
    warnings.simplefilter("ignore")
    read = READERS[sys.argv[1]]
    out, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115
    signal.signal(signal.SIGALRM, hung)
    directories = sys.stdin.read().split("\n")
    read(directories[0])  # a sound one: imports, pools and caches are made now
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (1 << 30),) * 2)
    for directory in directories:
        print(json.dumps(attempt(read, directory)), file=out, flush=True)


if __name__ == "__main__":
    main()
