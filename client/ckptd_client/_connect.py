"""connect: its arguments and the environment, checked before anything else happens."""

import os
from collections.abc import Sequence

from ckptd.shared.settings.variables import check_variables
from ckptd_client._daemon import settings as _settings
from ckptd_client._daemon.link import Link
from ckptd_client._daemon.options import Settings
from ckptd_client._daemon.reach import configured_store
from ckptd_client._daemon.rendezvous import announce_failure
from ckptd_client._local.argument_checks import as_flag, as_seconds, checks_arguments
from ckptd_client._local.rank import find_group, lone_group
from ckptd_client._state.pickle import pickle_keys
from ckptd_client.client import Client


@checks_arguments
def connect(  # noqa: PLR0913 - keyword-only settings
    job: str | None = None,
    *,
    store: str | os.PathLike[str] | None = None,
    arena: str | os.PathLike[str] | None = None,
    drain_every: int | str = 1,
    layout: str = "dual",
    save_timeout_s: float | None = None,
    connect_timeout_s: float = 60.0,
    start: bool | None = None,
    takeover: bool = False,
    store_id: str | None = None,
    allow_pickle: Sequence[str] = (),
    redundancy: str | None = None,
    set_size: int | None = None,
    balance: str | None = None,
    replicated: Sequence[str] = (),
    verify_replicas: str | int = "drained",
    per_rank: Sequence[str] = (),
    alone: bool = False,
    integrity: str | None = None,
    integrity_key_file: str | os.PathLike[str] | None = None,
) -> Client:
    """Returns a client of this node's daemon, and starts the daemon if none runs. Collective: every rank calls it.

    The ranks agree where their daemons meet over torch.distributed or mpi4py: on several nodes, call
    `init_process_group` first. An error of one rank before that is raised on all. `connect` blocks until all ranks have
    called it, and then until the ranks of earlier runs of the job have ended.

    Args:
        job: Stable name of the training. Default: `$CKPTD_JOB`.
        store: Directory on the parallel file system, also `"~/ckpt"`, or relative to this process's working directory.
            Default: `$CKPTD_STORE`, then the store that the running daemon is configured with. Created if only its last
            part is missing.
        arena: Directory on tmpfs. Default: the daemon's.
        drain_every: Which staged checkpoints go to the store: 1, each; 100, the first at or after each multiple of 100
            steps; "300s", one in 300 seconds; "auto", as often as the store keeps up: when 1.25 times its last drain
            has passed since the one before, or an hour. The first checkpoint of a run always goes.
        layout: "dual", or "plain" for images without torch.save archives, which plain `dcp.load` does not read.
        save_timeout_s: Most seconds that `save` may hold up training. Default: `$CKPTD_SAVE_TIMEOUT_S` or 10. A first
            save whose memory is not allocated yet also waits for that, about one second per 100 MB.
        connect_timeout_s: Most seconds to wait for the other ranks, and then for each rank of an earlier run. The error
            names the missing or remaining ranks; all ranks may call `connect` again.
        start: False starts no daemon and waits for one (also `$CKPTD_NO_AUTOSTART=1`).
        takeover: Replaces ranks of this job that still run.
        store_id: Id of the store (`ckptd list` shows it). Default: `$CKPTD_STORE_ID`. Another store at the path, or
            none, is an error. "any" accepts any store there and creates one where none is.
        allow_pickle: Keys, or patterns such as `"hooks.*"`, of values that may be pickled when they have no safe
            encoding, and unpickled by `load`: a pickle runs code of its author. Pass it when saving and when loading.
        redundancy: What the nodes of a job keep for each other in memory: "xor" survives the loss of one node of a set,
            "double" of two, "none" of none. Default: the setting of rank 0's daemon (`$CKPTD_REDUNDANCY` there).
        set_size: Nodes per redundancy set, 2 to 64. Default: the daemon's. The same on all ranks, as `redundancy`.
        balance: "rows": ranks that hold the same tensors each save an equal slice of them, cut at rows. "off": each
            rank saves all that it holds. Default: `$CKPTD_BALANCE` or the daemon's. Known to be the same are the
            parameters of a DistributedDataParallel in the state, the state of a torch optimizer in it that has no
            others, replicated DTensors, and the keys of `replicated`.
        replicated: Keys or patterns, such as `"model.*"`, of tensors that are equal on all ranks of the job.
        verify_replicas: When the ranks compare all bytes of such tensors, which costs one read of them before `save`
            returns (GPUs compare in the background): "drained", for each save that may be drained; a number n, for one
            of n saves, beginning with the first; "off", never. Other saves compare a 256th of the bytes. Ranks that
            differ end the save as `abandoned`, and each saves all of its own from then on. `ckptd list`, `ckptd status`
            and the notes of a load mark a durable checkpoint whose replicas differ or were not all compared. The same
            on all ranks.
        per_rank: Keys or patterns, such as `"rng"` or `"loader.*"`, of values that belong to one rank each; a key
            stands for everything below it. Only the rank of the same number loads such a value. In a job of more ranks
            a new rank keeps its present value, and a note says so; in one of fewer the values of missing ranks are
            dropped and named. Of other names a new rank takes the value of rank 0; notes name those that differed
            between ranks. Pass it when loading, and when saving values that would otherwise count as the same on all
            ranks.
        alone: This process is the whole job, whatever ranks run beside it: for trainers in which one rank saves for
            all.
        integrity: "keyed": digests that nobody can make without the key in `integrity_key_file` (`ckptd keygen
            --integrity`), which the daemon has too; nothing else is loaded. "xxh3": digests that find accidents.
            Default: `$CKPTD_INTEGRITY`, or "keyed" if there is a key.
        integrity_key_file: File of that key. Default: `$CKPTD_INTEGRITY_KEY_FILE`.

    Returns:
        The open client. Close it, or use it as a context manager.

    Raises:
        ConfigError: A setting is malformed, or impossible on this machine.
        ConnectError: No daemon answers, or it refuses the job; ranks are missing, or older ones still run.
        UsageError: An argument has the wrong type, or the ranks disagree.
    """
    patience_s = as_seconds("connect_timeout_s", connect_timeout_s, such_as=60)
    group = lone_group() if as_flag("alone", alone) else find_group(patience_s)
    with announce_failure(group):
        check_variables(os.environ)
        place = _settings.arena_path(arena)
        key = _settings.job_key(job, store, lambda: configured_store(place))
        settings = Settings(
            arena=place,
            cadence=_settings.parse_cadence(drain_every),
            unstarted=_settings.why_unstarted(start),
            takeover=as_flag("takeover", takeover),
            store_id=_settings.as_store_id(store_id, key.store),
            connect_timeout_s=patience_s,
            pickle_keys=pickle_keys(allow_pickle),
            redundancy=_settings.as_scheme(redundancy),
            set_size=_settings.as_set_size(set_size),
            balance=_settings.is_balanced(balance),
            verify=_settings.verification(verify_replicas),
            proof=_settings.proof_of(integrity, integrity_key_file),
            named=_settings.as_named(per_rank, replicated),
        )
        dual, timeout_s = _settings.is_dual(layout), _settings.save_timeout(save_timeout_s)
    return Client(Link(key, group, settings), timeout_s, dual=dual)
