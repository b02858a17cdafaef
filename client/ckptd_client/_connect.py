"""connect: its arguments and the environment, checked before anything else happens."""

import os
from collections.abc import Sequence

from ckptd.shared.base.variables import check_variables
from ckptd_client._daemon import settings as _settings
from ckptd_client._daemon.link import Link
from ckptd_client._daemon.options import Settings
from ckptd_client._daemon.reach import configured_store
from ckptd_client._daemon.topology import failure_told
from ckptd_client._local.argument_checks import as_flag, as_seconds, told_by_name
from ckptd_client._local.rank import find_group, lone_group
from ckptd_client._state.pickle import pickle_keys
from ckptd_client.client import Client


@told_by_name
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
    """A client of this node's daemon, which is started if none runs. Collective: every rank of the job calls it.

    job: the training's stable name, default $CKPTD_JOB. store: absolute directory on the parallel file system, default
    $CKPTD_STORE, then what the daemon that runs is configured with; made if only its last part is missing.
    drain_every: which staged checkpoints go there: a run's first one, and with 100 the first at or after each multiple
    of 100 steps, with "300s" one in so many seconds. layout: "plain" for images without torch.save archives, which
    plain dcp.load does not read. save_timeout_s: the longest that save may hold up training, default
    $CKPTD_SAVE_TIMEOUT_S or 10; a first save whose memory is not made yet waits for that too, a second per 100 MB.
    start: False starts no daemon, and waits for one (also $CKPTD_NO_AUTOSTART=1). takeover: replaces ranks of this job
    that run.
    store_id: the id of the store (`ckptd list` shows it), default $CKPTD_STORE_ID: any other store at that path, or
    none, is an error; "any" takes whatever lies there, and makes a store where none is.
    allow_pickle: keys, or patterns such as "hooks.*", of values that may be pickled if they have no safe encoding, and
    be read back: a pickle runs code of whoever wrote it. To be said to the client that saves, and to one that loads.
    redundancy: what the nodes of a job keep for each other in memory: "xor" survives the loss of one node of a set,
    "double" of two, "none" of none; default what rank 0's daemon is configured with ($CKPTD_REDUNDANCY there).
    set_size: nodes per set, 2 to 64, default the daemon's. Both the same on all ranks; on one node neither matters.
    balance: "rows": ranks that hold the same tensors each save an equal share of them, cut at rows; "off": each saves
    all that it holds; default $CKPTD_BALANCE or the daemon's. Known to be the same are the parameters of a
    DistributedDataParallel in the state, the state of a torch optimizer in it that has no others, replicated DTensors,
    and what replicated names: keys or patterns, such as "model.*", of tensors that are equal on all ranks of the job.
    verify_replicas: when the ranks compare all bytes of such tensors, each reading its own once before save returns
    (GPUs do so by themselves): "drained", for each save that may be drained; a number n, for one of n saves, the first
    among them; "off", never. Other saves compare a 256th. Ranks that differ end the save abandoned, and each saves
    all of its own from then on. Durable though they differ, or without all being compared, is marked: ckptd list, ckptd
    status, and the notes of a load. The same on all ranks.
    per_rank: keys or patterns, such as "rng" or "loader.*", of what each rank has for itself; a key stands for all that
    is below it. Such a value is loaded by the rank of the same number alone: in a job of more ranks a new rank keeps
    its present value and is told, in one of fewer those of ranks that are gone are dropped and named. Of other names a
    new rank takes what rank 0 saved; ``notes`` name those of which ranks had differing values. To be said when loading,
    and when saving what would count as the same on all ranks.
    alone: this process is all of the job, whatever ranks run beside it, for trainers in which one rank saves for all.
    integrity: "keyed": digests that nobody makes without the key in integrity_key_file (ckptd keygen --integrity), the
    daemon's too; nothing else is loaded. "xxh3": digests that find accidents. Default $CKPTD_INTEGRITY, or keyed if
    there is a key: $CKPTD_INTEGRITY_KEY_FILE.

    The ranks tell each other where they run (torch.distributed, mpi4py): over several nodes, init_process_group comes
    first. What fails on one rank before that is raised on all. Blocks until all ranks have called it, and then until
    all earlier ranks of the job are gone, for each of which it waits connect_timeout_s at most: the error names those
    that did not come, or did not go, and all may call it again. Raises ConfigError, ConnectError, UsageError.
    """
    patience_s = as_seconds("connect_timeout_s", connect_timeout_s, such_as=60)
    group = lone_group() if as_flag("alone", alone) else find_group(patience_s)
    with failure_told(group):
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
