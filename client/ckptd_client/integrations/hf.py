"""Under Hugging Face's Trainer: ``class MyTrainer(CkptdTrainerMixin, Trainer)``. docs/huggingface.md has an example.

The Trainer's own saver runs, but its tensors go into shared memory, and the daemon publishes ``checkpoint-N`` where the
Trainer would have written it. ``resume_from_checkpoint=True`` takes the newest one, from memory where it is there.
"""
# ruff: noqa: SLF001 - Trainer has its savers and loaders private, for classes derived from it

import functools
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from ckptd.shared.base.errors import IntegrityError, RestoreError
from ckptd_client._load.files import RestoredFiles
from ckptd_client.client import Client
from ckptd_client.integrations._kit.capture import Capture
from ckptd_client.integrations._kit.framework import Framework
from ckptd_client.integrations._kit.trainer_run import TrainerRun, log
from ckptd_client.integrations._kit.unproved import check_unproved, is_keyed

TRANSFORMERS = Framework("Hugging Face Transformers", "transformers", "5.23")
_NAME_RE = re.compile(r"checkpoint-(\d+)")
_STATE = "trainer_state.json"
AUTO = "auto"
"""For train(resume_from_checkpoint=...): True where there is a checkpoint, else None."""


class CkptdTrainerMixin:
    """A mixin before Trainer, or a class derived from it: `class MyTrainer(CkptdTrainerMixin, Trainer)`.

    All ranks connect when `train()` begins and leave when it ends. At its end it blocks until the saves are durable.

    Args:
        ckptd: Arguments of `ckptd_client.connect`, such as `{"store": "/pfs/run", "drain_every": 100}`. Default: a
            store beside the checkpoints, in `output_dir`. All other arguments are Trainer's.
    """

    _ckptd: TrainerRun | None = None
    _ckptd_saving = ""  # the directory that stands for output_dir while a checkpoint is saved

    def __init__(self, *args: Any, ckptd: Mapping[str, Any] | None = None, **options: Any) -> None:
        self._ckptd_options = dict(ckptd or {})
        super().__init__(*args, **options)

    @property
    def ckptd_client(self) -> Client | None:
        """The client, while `train()` runs."""
        return self._ckptd.client if self._ckptd is not None else None

    def train(self: Any, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **options: Any) -> Any:
        """As Trainer's. `True` resumes the newest checkpoint, in memory or in `output_dir`; so does "auto", if any.

        The path of a checkpoint in `output_dir` may be given before it has appeared there. Raises what connect and
        Trainer do.
        """
        stock: Any = super()
        reason = _why_stock(self, trial)
        if reason:
            log.warning("ckptd: %s: this training saves and resumes as without ckptd", reason)
            if resume_from_checkpoint == AUTO:
                resume_from_checkpoint = _last(self.args.output_dir) or None
            return stock.train(resume_from_checkpoint, trial, *args, **options)
        self._ckptd = run = TrainerRun(self.args.output_dir, self._ckptd_options)
        try:
            where = _place_to_resume(run, os.path.abspath(self.args.output_dir), resume_from_checkpoint)
            return stock.train(where, trial, *args, **options)
        finally:
            self._ckptd = None
            run.close()

    def _save_checkpoint(self: Any, model: Any, trial: Any) -> None:
        stock: Any = super()
        run = self._ckptd
        if run is None:
            stock._save_checkpoint(model, trial)
            return
        name = f"checkpoint-{self.state.global_step}"
        directory = os.path.join(os.path.abspath(self.args.output_dir), name)
        with Capture() as capture:
            self._ckptd_saving = capture.directory
            try:
                stock._save_checkpoint(model, trial)
            finally:
                self._ckptd_saving = ""
            best = self._ckptd_note_best(name)
            if self.args.should_save:  # again, since the stock saver knows of no directory but this one
                self.state.save_to_json(os.path.join(capture.directory, name, _STATE))
            run.save(capture.files(name), directory, self.state.global_step, drain=best)
        run.aside.run(self._ckptd_rotation())

    def _get_output_dir(self: Any, trial: Any) -> Any:
        stock: Any = super()
        return self._ckptd_saving or stock._get_output_dir(trial)

    def _ckptd_note_best(self: Any, name: str) -> bool:
        """Has the state name the best checkpoint's directory, as Trainer does. Whether it is the one being saved."""
        if not self.state.best_global_step:
            return False
        best = f"checkpoint-{self.state.best_global_step}"
        path = os.path.join(self.args.output_dir, best)
        if best == name or self._ckptd.is_coming(os.path.abspath(path)):
            self.state.best_model_checkpoint = path
        return best == name

    def _ckptd_rotation(self: Any) -> Callable[[], None]:
        """Trainer's own rotation, of what is published; of nothing before the best one is."""
        best = self.state.best_model_checkpoint
        if not self.args.should_save or (best is not None and not os.path.isdir(best)):
            return _nothing
        return functools.partial(_rotate, self.args.output_dir, self.args.save_total_limit, best)

    def _load_optimizer_and_scheduler(self: Any, checkpoint: Any) -> None:
        stock: Any = super()
        stock._load_optimizer_and_scheduler(checkpoint)
        run, state = self._ckptd, self.state
        if run is None or checkpoint is None or not state.best_global_step:
            return
        if run.agreed("" if state.best_model_checkpoint else "forgotten"):  # by Trainer, as not published yet
            path = os.path.join(self.args.output_dir, f"checkpoint-{state.best_global_step}")
            try:
                files = run.find(os.path.abspath(path))
            except IntegrityError as error:  # it is another one that was resumed
                log.warning("ckptd: %s", error)
                files = None
            if files is not None:
                files.close()
                state.best_model_checkpoint = path

    def _load_rng_state(self: Any, checkpoint: Any) -> None:
        """What a resuming Trainer reads last."""
        stock: Any = super()
        stock._load_rng_state(checkpoint)
        if self._ckptd is not None and not self.args.auto_find_batch_size:  # which may begin again
            self._ckptd.loaded()

    def _finalize_training(self: Any, *args: Any, **options: Any) -> Any:
        stock: Any = super()
        if self._ckptd is not None:
            self._ckptd.settle()
            self._ckptd_bring_best()
            self._ckptd_rotation()()
        return stock._finalize_training(*args, **options)

    def _ckptd_bring_best(self: Any) -> None:
        """The best checkpoint, if it was saved in an earlier run and never published, is written by rank 0."""
        run, path = self._ckptd, self.state.best_model_checkpoint
        best = run.agreed(path if path is not None and not os.path.isdir(path) else "")
        if not best:
            return
        problem = run.bring(os.path.abspath(best))
        if problem:
            log.error("ckptd: the best checkpoint, %s, is not there, and the model stays as it is: %s", best, problem)
        self.state.best_model_checkpoint = best if not problem else None


def _nothing() -> None:
    """For a rank that does not rotate."""


def _rotate(output_dir: str, limit: int | None, best: str | None) -> None:
    utils = TRANSFORMERS.module("transformers.trainer_utils")
    utils.rotate_checkpoints(output_dir, save_total_limit=limit, best_model_checkpoint=best, use_mtime=True)


def _place_to_resume(run: TrainerRun, output_dir: str, asked: Any) -> Any:
    """What Trainer resumes from: a directory, or what was asked for. Collective.

    With a key it is none that ckptd has saved: what Trainer reads is then in memory, and proved.
    """
    if asked is True or asked == AUTO:
        asked = asked if asked is True else None
        last = run.agreed(_last(output_dir))
        try:
            files = run.newest()
            if files is not None and _is_at_least(files, output_dir, last):
                return run.open(files, os.path.join(output_dir, os.path.basename(files.directory or "")))
        except RestoreError as error:
            if not last:
                raise
            check_unproved(run.client, last, str(error))
            log.warning("ckptd: %s is resumed, since %s", last, error)
            return last
        if files is not None:
            files.close()
        if not last or not is_keyed(run.client):
            return last or asked
        asked = last
    if not asked or os.path.dirname(os.path.abspath(asked)) != output_dir:
        return asked
    files = run.find(os.path.abspath(asked))
    if files is None:
        return asked
    if not is_keyed(run.client) and run.agreed("there" if files.is_published and os.path.isdir(asked) else ""):
        files.close()
        return asked
    return run.open(files, os.path.abspath(asked))


def _last(output_dir: str) -> str:
    """The highest one that is published there; empty when there is none."""
    if not os.path.isdir(output_dir):
        return ""
    return TRANSFORMERS.module("transformers.trainer_utils").get_last_checkpoint(output_dir) or ""


def _is_at_least(files: RestoredFiles, output_dir: str, last: str) -> bool:
    """Whether they were saved for a directory of output_dir, and for none before the last one there."""
    folder, name = os.path.split(files.directory or "")
    if folder != output_dir or not _NAME_RE.fullmatch(name):
        return False
    return not last or _number(name) >= _number(os.path.basename(last))


def _number(name: str) -> int:
    found = _NAME_RE.fullmatch(name)
    return int(found[1]) if found else -1


def _why_stock(trainer: Any, trial: Any) -> str:
    """Why ckptd leaves a training to Trainer's own saver; empty if it does not."""
    args = trainer.args
    imports = TRANSFORMERS.module("transformers.utils")
    reasons = {
        "DeepSpeed has checkpoints of its own (see docs/deepspeed.md)": trainer.is_deepspeed_enabled,
        "FSDP writes sharded checkpoints": trainer.is_fsdp_enabled,
        "push_to_hub sends a checkpoint when it is written": args.push_to_hub,
        "save_on_each_node writes other files on each node": args.save_on_each_node,
        "enable_jit_checkpoint wants the checkpoint on disk at once": getattr(args, "enable_jit_checkpoint", False),
        "a hyperparameter search": trial is not None or trainer.hp_search_backend is not None,
        "XLA": imports.is_torch_xla_available(),
        "SageMaker's model parallelism": imports.is_sagemaker_mp_enabled(),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")
