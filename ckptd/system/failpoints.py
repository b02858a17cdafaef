"""The one list of crash points. Each is a no-op unless armed by CKPTD_FAILPOINT.

``CKPTD_FAILPOINT=name`` ends the process that reaches the point with SIGKILL, as a power cut or the OOM killer would.
``CKPTD_FAILPOINT=name@/path/marker`` does so once: the marker is created exclusively, so a second process continues.
"""

import os
import signal

VARIABLE = "CKPTD_FAILPOINT"

POINTS = (
    # stage: the daemon takes a segment over from a rank
    "stage.segment-received",
    "stage.before-digest",
    "stage.before-table",
    "stage.before-digested-seal",
    "stage.after-digested-seal",
    "stage.before-staged-told",
    "stage.after-staged-told",
    "stage.before-slot-freed",
    "stage.after-slot-freed",
    # drain: the worker writes a segment to the store
    "drain.ordered",
    "drain.partial-made",
    "drain.half-written",
    "drain.before-truncate",
    "drain.before-file-sync",
    "drain.before-file-rename",
    "drain.after-file-rename",
    "drain.between-parts",
    "drain.reported",
    # commit: votes, manifest, rename
    "commit.before-vote",
    "commit.vote-unsynced",
    "commit.after-vote",
    "commit.before-manifest",
    "commit.index-unsynced",
    "commit.index-named",
    "commit.manifest-unsynced",
    "commit.before-committed",
    "commit.committed-unsynced",
    "commit.before-rename",
    "commit.after-rename",
    "commit.after-parent-sync",
    "commit.after-latest",
    "commit.before-durable-told",
    "commit.after-durable-told",
    # publish: a trainer's files get the names by which it looks for them
    "publish.before-rename",
    "publish.before-pointer",
    "publish.done",
    # encode: the parity of a save
    "encode.before-file",
    "encode.file-made",
    "encode.half-pulled",
    "encode.before-record",
    "encode.before-seal",
    "encode.after-seal",
    # rebuild: a segment made again, or copied, from other nodes
    "rebuild.slot-made",
    "rebuild.half-pulled",
    "rebuild.before-check",
    "rebuild.before-seal",
    "rebuild.after-seal",
    # and a file on the store made again
    "repair.file-unsynced",
    "repair.before-file-rename",
    "repair.after-file-rename",
    # retention: older checkpoints leave the store
    "remove.before-rename",
    "remove.after-rename",
    "remove.after-committed",
    # and lose a part of what they have
    "drop.before-aside",
    "drop.after-aside",
    "drop.after-rename",
)

_armed, _, _marker = os.environ.get(VARIABLE, "").partition("@")


def reach(name: str) -> None:
    """Ends this process if the point is armed. name is one of POINTS."""
    if name != _armed:
        return
    if _marker:
        try:
            os.close(os.open(_marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return
    os.kill(os.getpid(), signal.SIGKILL)
