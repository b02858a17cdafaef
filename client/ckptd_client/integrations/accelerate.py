"""Under Hugging Face Accelerate: CkptdAccelerator instead of Accelerator. docs/huggingface.md has an example.

``save_state(directory)`` returns when the state is in shared memory, and the daemon publishes the directory; what
``load_state`` reads comes from memory where it is there, by Accelerate's own loader.
"""

import copy
import os
import pathlib
import re
import shutil
from collections.abc import Mapping
from typing import Any

from ckptd.shared.base.errors import RestoreError, UsageError
from ckptd_client.integrations._kit.capture import Capture
from ckptd_client.integrations._kit.framework import Framework
from ckptd_client.integrations._kit.trainer_run import TrainerRun, log
from ckptd_client.integrations._kit.unproved import check_unproved, is_keyed

ACCELERATE = Framework("Hugging Face Accelerate", "accelerate", "1.15")
_OTHERS = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA")  # kinds of training that write checkpoints of their own
_NAME_RE = re.compile(r"checkpoint_(\d+)")


class CkptdAccelerator(ACCELERATE.base("accelerate", "Accelerator")):  # type: ignore[misc]
    """An Accelerator whose `save_state` stages. Takes Accelerator's arguments, and `ckptd`.

    All ranks connect with their first `save_state` or `load_state`. If store and job are known earlier, wrong settings
    raise when the Accelerator is made.

    Args:
        ckptd: Arguments of `ckptd_client.connect`. Default: a store in the project's directory, where checkpoints are
            named automatically, or else beside the first directory that is saved or loaded.
    """

    project_configuration: Any

    def __init__(self, *args: Any, ckptd: Mapping[str, Any] | None = None, **options: Any) -> None:
        self._ckptd_options = dict(ckptd or {})
        self._ckptd: TrainerRun | None = None
        self._ckptd_told = False
        super().__init__(*args, **options)
        self._ckptd_try()

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **options: Any) -> Any:
        """As Accelerator's, but the directory appears when the daemon has drained it.

        Collective. The state may change at once. Raises ValueError for a directory of the automatic naming that exists
        already, and what `Client.save_files` raises; operational faults are logged, and training goes on.
        """
        if self._ckptd_leaves():
            return super().save_state(output_dir, safe_serialization, **options)
        directory = self._ckptd_directory(output_dir)
        run = self._ckptd_run(directory)
        named = self.project_configuration
        if named.automatic_checkpoint_naming and run.agreed("there" if run.is_coming(directory) else ""):
            raise ValueError(f"{directory} is there already: set project_configuration.iteration to where to go on")
        with Capture() as capture:
            self.project_configuration = copy.copy(named)
            self.project_configuration.automatic_checkpoint_naming = False
            try:
                super().save_state(capture.directory, safe_serialization, **options)
            finally:
                self.project_configuration = named
            run.save(capture.files(), directory, None)
        named.iteration += 1
        run.aside.run(self._ckptd_rotate)
        return pathlib.Path(directory)

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **options: Any) -> Any:
        """As Accelerator's: loads the newest save for the directory, also before it has appeared. Collective.

        Without a directory, where checkpoints are named automatically, it loads the one with the highest number.
        """
        if self._ckptd_leaves():
            return super().load_state(input_dir, load_kwargs, **options)
        automatic = input_dir is None and self.project_configuration.automatic_checkpoint_naming
        if input_dir is None and not automatic:
            return super().load_state(input_dir, load_kwargs, **options)  # which says what is missing
        directory = self._ckptd_project() if automatic else _absolute(input_dir)
        run = self._ckptd_run(directory)
        where = self._ckptd_newest(run, directory) if automatic else _open(run, directory)
        try:
            return super().load_state(where, load_kwargs, **options)
        finally:
            run.loaded()

    def end_training(self) -> Any:
        """As Accelerator's, after the saves are durable. Then leaves the job."""
        run, self._ckptd = self._ckptd, None
        if run is not None:
            run.settle()
            self._ckptd_rotate()
            run.close()
        return super().end_training()

    def _ckptd_leaves(self) -> bool:
        """Whether ckptd leaves this training to Accelerate's own saver."""
        kind = self.distributed_type.name
        reason = f"{kind} writes checkpoints of its own" if kind in _OTHERS else ""
        if self.project_configuration.save_on_each_node:
            reason = "save_on_each_node writes other files on each node"
        if reason and not self._ckptd_told:
            self._ckptd_told = True
            log.warning("ckptd: %s: this training saves and loads as without ckptd", reason)
        return bool(reason)

    def _ckptd_try(self) -> None:
        """Joins the job for a moment, where it is known: the first save may be hours away."""
        automatic = self.project_configuration.automatic_checkpoint_naming and self.project_dir is not None
        named = all(self._ckptd_options.get(key) or os.environ.get(f"CKPTD_{key.upper()}") for key in ("store", "job"))
        if (automatic or named) and not self._ckptd_leaves():
            TrainerRun(_absolute(self.project_dir) if automatic else os.getcwd(), self._ckptd_options).close()

    def _ckptd_run(self, directory: str) -> TrainerRun:
        if self._ckptd is None:
            # Not among checkpoints that are named automatically: Accelerate wants a number in each name there.
            automatic = self.project_configuration.automatic_checkpoint_naming
            place = _absolute(self.project_dir) if automatic else os.path.dirname(directory)
            self._ckptd = TrainerRun(place, self._ckptd_options)
        return self._ckptd

    def _ckptd_project(self) -> str:
        return _absolute(os.path.join(self.project_dir, "checkpoints"))

    def _ckptd_directory(self, output_dir: Any) -> str:
        if self.project_configuration.automatic_checkpoint_naming:
            return os.path.join(self._ckptd_project(), f"checkpoint_{self.save_iteration}")
        if output_dir is None:
            raise UsageError("save_state was given no directory", hint="ProjectConfiguration has automatic names")
        return _absolute(output_dir)

    def _ckptd_newest(self, run: TrainerRun, place: str) -> str:
        """What Accelerate would load, were everything published that was saved."""
        last = int(run.agreed(str(max(_published(place), default=-1))))
        try:
            files = run.newest()
            if files is not None:
                folder, name = os.path.split(files.directory or "")
                if folder == place and _NAME_RE.fullmatch(name) and _number(name) >= last:
                    return run.open(files, os.path.join(place, name))
                files.close()
        except RestoreError as error:
            if last < 0:
                raise
            check_unproved(run.client, os.path.join(place, f"checkpoint_{last}"), str(error))
            log.warning("ckptd: checkpoint_%d is loaded, since %s", last, error)
        if last < 0:
            raise ValueError(f"there is no checkpoint in {place}")
        where = os.path.join(place, f"checkpoint_{last}")
        return _open(run, where) if is_keyed(run.client) else where

    def _ckptd_rotate(self) -> None:
        """Deletes the oldest that are published, but for total_limit of them."""
        config = self.project_configuration
        if not (config.automatic_checkpoint_naming and config.total_limit is not None and self.is_main_process):
            return
        for number in sorted(_published(self._ckptd_project()))[: -config.total_limit or None]:
            shutil.rmtree(os.path.join(self._ckptd_project(), f"checkpoint_{number}"), ignore_errors=True)


def _open(run: TrainerRun, directory: str) -> str:
    """Where the directory's newest checkpoint can be read. Collective."""
    files = run.find(directory)
    return run.open(files, directory) if files is not None else directory


def _absolute(path: Any) -> str:
    return os.path.abspath(os.path.expanduser(str(path)))


def _published(place: str) -> list[int]:
    names = os.listdir(place) if os.path.isdir(place) else []
    return [number for name in names if (number := _number(name)) >= 0]


def _number(name: str) -> int:
    found = _NAME_RE.fullmatch(name)
    return int(found[1]) if found else -1
