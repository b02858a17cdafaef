"""DeepSpeed: ``attach(model_engine)``, and save_checkpoint returns as soon as training may go on.

A checkpoint engine takes what DeepSpeed would have written, whatever its engine, as files into this node's memory.
The daemon drains them; the tag's directory and ``latest`` appear after that, byte for byte what stock DeepSpeed and its
tools read. load_checkpoint takes them from memory while the node has them.
"""

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch.distributed as dist

from ckptd.shared.base.errors import RestoreError, UsageError
from ckptd.shared.base.ids import MAX_PARTS
from ckptd.shared.format.origin import MARKER
from ckptd_client._load.files import RestoredFiles
from ckptd_client.client import Client, staging_of
from ckptd_client.files import TorchFile
from ckptd_client.handle import SaveHandle
from ckptd_client.integrations._kit.framework import Framework
from ckptd_client.integrations._kit.options import connect_with
from ckptd_client.integrations._kit.ranks import from_rank_0
from ckptd_client.integrations._kit.unproved import check_unproved, find_saved, is_keyed, was_ours

log = logging.getLogger("ckptd_client")

DEEPSPEED = Framework("DeepSpeed", "deepspeed", "0.19")
_ENGINE = DEEPSPEED.base("deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine", "TorchCheckpointEngine")
_LATEST = "latest"
_ALLOW = 'allow_pickle=["*.pt"]'  # what DeepSpeed writes
_MAX_EXPERTS = MAX_PARTS - 8  # of the files of a rank; the others are its module's, its optimizer's, and ckptd's


def attach(
    model_engine: Any, client: Client | None = None, *, drain: bool = True, **connect_settings: Any
) -> "Attached":
    """Routes the engine's `save_checkpoint` and `load_checkpoint` through ckptd. Collective, after `initialize`.

    DeepSpeed's files are pickles. ckptd unpickles those whose names `allow_pickle` has (`["*.pt"]` for all); DeepSpeed
    reads the others from the disk.

    Args:
        model_engine: What `deepspeed.initialize` returned.
        client: An open client. Without one, `connect_settings` are those of `ckptd_client.connect`, and `close` closes
            it.
        drain: True: every checkpoint is written to the store, whatever `drain_every` says; of those that wait for a
            slow store, only the newest. False: as `drain_every` says.
        connect_settings: Arguments of `ckptd_client.connect`, only without a client.

    Returns:
        The handle of the attachment; close it when training is over.

    Raises:
        UsageError: The engine's checkpoints are more than files of torch.save (offloaded to NVMe, node local), or have
            too many files (experts). Also what `connect` raises.
    """
    DEEPSPEED.module("deepspeed")
    if not hasattr(model_engine, "checkpoint_engine"):
        text = f"attach takes what deepspeed.initialize returned first, not {type(model_engine).__name__}"
        raise UsageError(text, hint="model_engine, *_ = deepspeed.initialize(...)")
    if isinstance(model_engine.checkpoint_engine, CkptdCheckpointEngine):
        raise UsageError("ckptd is attached to this engine already", hint="attach once")
    experts = _experts_of(model_engine)
    for what, found in (
        (f"has {experts} experts on a rank, in a file each", experts > _MAX_EXPERTS),
        ("offloads its optimizer to NVMe", model_engine.zero_nvme_offload_optimizer()),
        ("saves to storage of each node (use_node_local_storage)", model_engine.use_node_local_storage()),
    ):
        if found:
            raise UsageError(f"the engine {what}, which ckptd does not save", hint="leave attach out")
    if client is not None and connect_settings:
        raise UsageError(f"a client and settings for another: {sorted(connect_settings)}", hint="give one of them")
    opened = connect_with(connect_settings) if client is None else client
    return Attached(model_engine, opened, owned=client is None, drain=drain)


def _experts_of(model_engine: Any) -> int:
    """How many experts this rank holds, over all layers."""
    layer = DEEPSPEED.module("deepspeed.moe.layer").MoE
    return sum(each.num_local_experts for each in model_engine.module.modules() if isinstance(each, layer))


class Attached:
    """ckptd under one engine: use it as a context manager, or call `close` when training is over."""

    def __init__(self, model_engine: Any, client: Client, *, owned: bool, drain: bool) -> None:
        self.client = client
        self._owned = owned
        self._model_engine = model_engine
        self._stock = model_engine.checkpoint_engine
        self._ours = CkptdCheckpointEngine(client, model_engine, self._stock, drain=drain)
        model_engine.checkpoint_engine = self._ours
        self._save, self._load = model_engine.save_checkpoint, model_engine.load_checkpoint
        model_engine.save_checkpoint = self._save_checkpoint
        model_engine.load_checkpoint = self._load_checkpoint

    @property
    def handle(self) -> SaveHandle | None:
        """The handle of the newest save, None before the first."""
        return self._ours.handle

    def close(self) -> None:
        """Gives the engine its own methods back, and closes a client that `attach` made. Staged saves are drained."""
        engine = self._model_engine
        if engine.checkpoint_engine is self._ours:
            engine.checkpoint_engine = self._stock
            del engine.save_checkpoint, engine.load_checkpoint
        if self._owned:
            self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        client_state = {} if client_state is None else client_state
        with self._ours.saving(save_latest):
            # DeepSpeed itself would have `latest` name what is not drained yet.
            return self._save(save_dir, tag, client_state, False, exclude_frozen_parameters)

    def _load_checkpoint(self, load_dir: str, tag: str | None = None, *args: Any, **options: Any) -> Any:
        files = self._found(load_dir, tag)
        if files is None:
            return self._load(load_dir, tag, *args, **options)
        with files:
            if not self._is_allowed(files):
                return self._load(load_dir, tag, *args, **options)
            whole = not options.get("load_optimizer_states", args[1] if len(args) > 1 else True)
            with _view(files, whole=whole) as view, self._ours.reading(files, view):
                name = os.path.basename(files.directory or "")
                path, state = self._load(view, name, *args, **options)
            return path and path.replace(view, os.path.abspath(load_dir), 1), state

    def _found(self, load_dir: str, tag: str | None) -> RestoredFiles | None:
        """What ckptd has of what is asked for; None: DeepSpeed is to load it from the disk, on all ranks."""
        files = self._newest(load_dir)
        if files is not None and self._is_wanted(files, load_dir, tag):
            return files
        if files is not None:
            files.close()
        return self._proved(load_dir, tag) if is_keyed(self.client) else None

    def _newest(self, load_dir: str) -> RestoredFiles | None:
        """What ckptd has; None when it cannot be read on some rank. With a key that raises, on all."""
        files, problem = None, ""
        try:
            files = self.client.load_files()
        except RestoreError as error:
            problem = str(error)
        problems = [problem] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        if not any(problems):
            return files
        if files is not None:
            files.close()
        check_unproved(self.client, load_dir, next(filter(None, problems)))
        log.warning("ckptd: what lies on the disk is loaded: %s", next(filter(None, problems)))
        return None

    def _proved(self, load_dir: str, tag: str | None) -> RestoredFiles | None:
        """For a client with a key: the tag that is asked for, whichever. None: ckptd knows nothing of it."""
        directory, steps, ours = from_rank_0(lambda: self._asked_for(load_dir, tag))
        if not directory:
            return None
        files, refused = find_saved(self.client, steps, lambda files: files.directory == directory)
        refused = from_rank_0(lambda: refused or ours)
        if files is None:
            if refused:
                check_unproved(self.client, directory, refused)
            return None
        if from_rank_0(lambda: files.is_altered):
            files.close()
            check_unproved(self.client, directory, "it was altered after it was saved")
        return files

    def _asked_for(self, load_dir: str, tag: str | None) -> tuple[str, list[int], str]:
        """The tag's directory, empty for none; the steps to look for it in; why it is no other program's."""
        name = _latest_of(load_dir) if tag is None else str(tag)
        if not name or self._model_engine.load_universal_checkpoint():
            return "", [], ""
        directory = os.path.join(os.path.abspath(load_dir), name)
        return directory, self.client.steps(by_save=True), was_ours(directory)

    def _is_allowed(self, files: RestoredFiles) -> bool:
        """Whether what ckptd has may be unpickled. One answer on all ranks; RestoreError where it lies nowhere else."""
        refused = [name for name in files.names if not staging_of(self.client).pickle_keys.allow(name)]
        any_refused, published = from_rank_0(lambda: (bool(refused), files.is_published))
        if not any_refused and not refused:
            return True
        what = f"step {files.step} in memory is pickles, which may run any code when they are read"
        if published:
            check_unproved(self.client, str(files.directory), f"{what}, and {_ALLOW} is not said to attach")
            log.warning("ckptd: %s: DeepSpeed loads it from the disk, its own way; attach(%s)", what, _ALLOW)
            return False
        raise RestoreError(what, hint=f"if you trust who wrote the checkpoint: attach(engine, {_ALLOW})")

    def _is_wanted(self, files: RestoredFiles, load_dir: str, tag: str | None) -> bool:
        """Whether what ckptd has is what is asked for, and not older than what lies there. One answer on all ranks."""
        return bool(from_rank_0(lambda: _is_wanted(files, load_dir, tag, self._model_engine)))


def _is_wanted(files: RestoredFiles, load_dir: str, tag: str | None, model_engine: Any) -> bool:
    if files.directory is None or model_engine.load_universal_checkpoint():
        return False
    where, name = os.path.split(files.directory)
    if where != os.path.abspath(load_dir) or (tag is not None and str(tag) != name):
        return False
    if any(files.is_replaced(file) for file in files.names):
        log.warning("ckptd: %s has been written again without ckptd: it is loaded", files.directory)
        return False
    return tag is not None or _is_pointed_at(files, where, name)


def _is_pointed_at(files: RestoredFiles, where: str, name: str) -> bool:
    """Whether `latest` names it, or will: not when it was saved without, nor when somebody went back to another."""
    if files.pointer is None:
        return False
    latest = _latest_of(where)
    if latest in {"", name}:
        return True
    stranger = os.path.isdir(os.path.join(where, latest)) and not os.path.exists(os.path.join(where, latest, MARKER))
    if stranger or files.is_published:
        log.warning("ckptd: %s names %s, not the newest that ckptd has, %s: it is loaded", _LATEST, latest, name)
        return False
    return True


def _latest_of(load_dir: str) -> str:
    """What `latest` there names; empty where there is none."""
    try:
        with open(os.path.join(load_dir, _LATEST), encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""


@contextlib.contextmanager
def _view(files: RestoredFiles, *, whole: bool) -> Iterator[str]:
    """A directory that looks like load_dir to what lists files before it loads them. whole: to what reads them too."""
    view = tempfile.mkdtemp(prefix="ckptd-view-", dir="/dev/shm" if whole else None)  # noqa: S108 - mkdtemp is safe
    try:
        name = os.path.basename(files.directory or "")
        if whole:
            files.write_to(os.path.join(view, name))
            with open(os.path.join(view, _LATEST), "w", encoding="utf-8") as file:
                file.write(name)
        else:
            for path in (os.path.join(view, name, file) for file in files.names):
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "xb"):
                    pass
        yield view
    finally:
        shutil.rmtree(view, ignore_errors=True)


class CkptdCheckpointEngine(_ENGINE):  # type: ignore[misc, valid-type]  # a class only where DeepSpeed is
    """What DeepSpeed calls while it saves and loads. Made by attach."""

    def __init__(self, client: Client, model_engine: Any, stock: Any, *, drain: bool) -> None:
        self.name = "CkptdCheckpointEngine"
        self.handle: SaveHandle | None = None
        self._saving = False  # a checkpoint, and not save_16bit_model
        self._points_latest = True
        self._client, self._drain = client, drain
        self._model_engine = model_engine
        self._stock = stock
        self._directory = ""  # of the tag that is being saved
        self._files: dict[str, TorchFile] = {}
        self._read: Callable[[str, Any], Any] | None = None

    # --- save, in the order in which DeepSpeed calls

    @contextlib.contextmanager
    def saving(self, points_latest: bool) -> Iterator[None]:
        """While this lasts, what is saved is a checkpoint, to which `latest` is to point or not."""
        self._saving, self._points_latest = True, points_latest
        try:
            yield
        finally:
            self._saving, self._files, self._directory = False, {}, ""

    def create(self, info: Any) -> None:
        """A save begins."""
        self._directory = os.path.abspath(os.path.join(info.save_dir, info.tag))
        self._files = {}

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """The tag's directory appears with its files in it, not before."""
        if not self._is_staged(os.path.abspath(path)):
            os.makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        """Remembers a file of the save; its tensors must stay as they are until commit."""
        path = os.path.abspath(path)
        if self._is_staged(path):
            self._files[os.path.relpath(path, self._directory)] = TorchFile(state_dict)
        else:  # such as save_16bit_model: a file that somebody waits for
            self._stock.save(state_dict, path)

    def commit(self, info: Any) -> bool:
        """Stages the files of this rank. Training may go on, and change every tensor, when it returns."""
        if not self._saving:
            return True
        files, step = self._files, self._client.free_step(self._model_engine.global_steps)
        latest = (os.path.join(os.path.dirname(self._directory), _LATEST), info.tag)
        self.handle = self._client.save_files(
            files,
            step,
            drain=self._drain,
            directory=self._directory,
            pointer=latest if self._points_latest else None,
        )
        return True

    def _is_staged(self, path: str) -> bool:
        """Whether it is the tag's directory that is being saved, or lies below it."""
        return self._saving and bool(self._directory) and _is_below(path, self._directory)

    def preserves_storage_sharing(self) -> bool:
        """Each tensor is saved without the rest of its storage: DeepSpeed need not clone."""
        return False

    # --- load

    @contextlib.contextmanager
    def reading(self, files: RestoredFiles, view: str) -> Iterator[None]:
        """While this lasts, paths below view are read from files."""
        root = os.path.join(view, os.path.basename(files.directory or ""))

        def read(path: str, map_location: Any) -> Any:
            name = os.path.relpath(path, root)
            allowed = staging_of(self._client).pickle_keys.allow(name)
            return files.torch_load(name, map_location=map_location, weights_only=not allowed)

        self._read = read
        try:
            yield
        finally:
            self._read = None

    def load(self, path: str, map_location: Any = None) -> Any:
        """A file's content, from memory while load_checkpoint goes by it."""
        if self._read is not None:
            return self._read(path, map_location)
        return self._stock.load(path, map_location=map_location)


def _is_below(path: str, directory: str) -> bool:
    return os.path.commonpath((path, directory)) == directory
