"""The rooms of the code and which room may import which: one table, printed in docs/architecture.md.

``python -m tests.unit.rooms`` prints it.
"""

from tests.unit.sources import EVERYTHING

SHARED = ("shared.base", "shared.format", "shared.protocol")

# room -> what it is for, and which other rooms it may import. A room is a folder, or a file beside the folders.
CKPTD = {
    "cli": (
        "one file per verb; cli/view: tables, bars, the screen, Prometheus text; cli/page: the report",
        (
            *SHARED,
            "shared.bulk",
            "shared.files",
            "shared.stores",
            "system",
            "arena",
            "store",
            "peers",
            "doctor",
            "checkpoint",
            "history",
            "core.coordinator",
            "daemon",
        ),
    ),
    "daemon": (
        "the loop and what it owns: connections of ranks, effects of actions, status, adoption",
        (
            *SHARED,
            "shared.bulk",
            "shared.files",
            "system",
            "arena",
            "parity",
            "peers",
            "store",
            "doctor",
            "history",
            "core",
            "core.coordinator",
        ),
    ),
    "checkpoint": (
        "offline work on committed checkpoints: verify, repair, export, finish",
        (*SHARED, "shared.bulk", "shared.files", "shared.stores", "shared.torchfile", "system", "parity", "store"),
    ),
    "history": (
        "pure: what a job's journal says: runs, goodput, how often to save",
        ("shared.protocol",),
    ),
    "doctor": (
        "probes, and the rules that judge them",
        (*SHARED, "shared.files", "shared.stores", "system", "arena", "peers", "store"),
    ),
    "store.posix": (
        "the store in a directory: it writes images, commits, scans, removes, publishes",
        (*SHARED, "shared.files", "shared.stores", "store", "system"),
    ),
    "store": (
        "what any store does: the interface, its registered kinds, the worker process, the drain",
        (*SHARED, "shared.files", "shared.stores", "shared.torchfile", "system", "parity", "history"),
    ),
    "peers": ("daemons of other nodes: the control plane", (*SHARED, "shared.bulk", "shared.files", "system", "core")),
    "parity": ("redundancy sets: code, engine, files", (*SHARED, "shared.bulk", "system", "arena")),
    "arena": ("the directory on tmpfs: slots, budget, the socket", (*SHARED, "shared.files", "system")),
    "core": ("pure: events, actions, all jobs", (*SHARED, "core.coordinator", "core.node")),
    "core.coordinator": ("pure: what concerns all ranks of a job", (*SHARED, "core", "history")),
    "core.node": ("pure: what concerns the slots of one node", (*SHARED, "core")),
    "system": (
        "this host: configuration, logs, locks, mounts, file effects, failpoints",
        ("shared.base", "shared.format", "shared.files", "shared.settings"),
    ),
    "shared.stores": (
        "committed checkpoints read from any store: the table of kinds, the reader of directories",
        ("shared.base", "shared.files", "shared.format"),
    ),
    "shared.bulk": ("byte ranges over TCP; the address that a user gives this host", ("shared.base", "shared.format")),
    "shared.files": ("files and mappings", ("shared.base", "shared.format")),
    "shared.torchfile": ("pure: files that torch reads", ("shared.base", "shared.format")),
    "shared.settings": ("which settings and variables there are", SHARED),
    "shared.protocol": ("pure: messages", ("shared.base", "shared.format")),
    "shared.format": ("pure: bytes in files and slots; redundancy schemes", ("shared.base",)),
    "shared.base": ("pure: names, errors and how both are worded", ()),
    "__main__": ("python -m ckptd", ("cli",)),
}
_BELOW = ("_local", "_state")
CLIENT = {
    "integrations": (
        "one module per trainer; integrations/_kit: the classes under them",
        ("_connect", "client", "dcp", "files", "handle", "_save", "_load", "_image", *_BELOW),
    ),
    "dcp": (
        "writer, reader and stager for torch.distributed.checkpoint",
        ("_connect", "client", "handle", "_save", "_load", "_daemon", "_image", *_BELOW),
    ),
    "demo": ("the demo", ("ckptd_client",)),
    "_connect": ("connect, public: its arguments and the environment", ("client", "_daemon", *_BELOW)),
    "client": (
        "Client, public",
        ("_preempt", "files", "handle", "_gather", "_save", "_load", "_daemon", "_local"),
    ),
    "_save": (
        "a save; _save/late: copies that run while training goes on",
        ("files", "_daemon", "_image", *_BELOW),
    ),
    "_load": (
        "a load; _load/foreign: other programs' files; _load/shared_read: each block once",
        ("_daemon", *_BELOW),
    ),
    "_gather": ("full tensors from sharded ones", ("_state",)),
    "_preempt": ("preemption: signals, and the step at which all ranks save", ("_daemon", "_local")),
    "_daemon": ("the connection to this node's daemon", _BELOW),
    "files": ("a trainer's own files, public", ("_image", "_state")),
    "_image": ("a rank's part of a checkpoint as one file image", _BELOW),
    "_state": ("a state as named leaves: tree, tensors, encodings, replicas, shards", ("_local",)),
    "_local": ("this process: its rank, the memory that it shares, copy engines", ()),
    "handle": ("SaveHandle, public", ("_local",)),
}  # fmt: skip
CLIENT_MAY = (
    *SHARED,
    "shared.bulk",
    "shared.files",
    "shared.settings",
    "shared.stores",
    "shared.torchfile",
)  # of ckptd
PURE = (
    "core",
    "core.coordinator",
    "core.node",
    "history",
    "shared.base",
    "shared.format",
    "shared.protocol",
    "shared.torchfile",
)
MAY = {
    **{f"ckptd.{room}": {f"ckptd.{name}" for name in names} | {"ckptd"} for room, (_, names) in CKPTD.items()},
    **{
        f"ckptd_client.{room}": {name if name == "ckptd_client" else f"ckptd_client.{name}" for name in names}
        | {f"ckptd.{name}" for name in CLIENT_MAY}
        for room, (_, names) in CLIENT.items()
    },
}


def room_of(module):
    """The room of a module; a package's own __init__ outside of all rooms is the package."""
    parts = module.split(".")
    if parts[0] == "ckptd" and len(parts) > 2 and ".".join(parts[1:3]) in CKPTD:
        return ".".join(parts[:3])
    return ".".join(parts[:2])


def table():
    """Rows of docs/architecture.md."""
    rows = ["| room | for | may import |", "|---|---|---|"]
    for top, rooms in (("ckptd", CKPTD), ("client/ckptd_client", CLIENT)):
        package = top.rpartition("/")[2]
        for room, (purpose, names) in rooms.items():
            path = f"{top}/{room.replace('.', '/')}"
            folder = EVERYTHING[f"{package}.{room}"].name == "__init__.py"
            may = [name for name in names if name not in SHARED] if {*SHARED} <= {*names} else list(names)
            may = ["base, format, protocol", *may] if {*SHARED} <= {*names} else may
            said = ", ".join(may).replace("shared.", "") or "nothing of ours"
            rows.append(f"| `{path}/` | {purpose} | {said} |" if folder else f"| `{path}.py` | {purpose} | {said} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
