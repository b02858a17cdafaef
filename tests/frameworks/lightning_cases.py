"""What Lightning documents of its checkpoints, and tests in its own repository, with ckptd underneath: rewritten.

Two ranks run each case with DDP, through the CheckpointIO, and with FSDP1 and FSDP2, through the strategies; what
Lightning itself leaves behind is asked of all: lightning_cases.py <folder> <kind> [case...].
"""

import os
import sys
import threading
import time
import traceback
from functools import partial

import lightning as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning_training import Net, Seeded, data, sharded_strategy, state_of
from torch.distributed.checkpoint.api import CheckpointException

from ckptd_client import ConfigError
from ckptd_client.integrations._kit.drafts import origin_of
from ckptd_client.integrations.lightning import CkptdCheckpointIO

CASES, SHARDED_CASES = [], []
EPOCHS = 3


def case(function):
    CASES.append(function)
    return function


def sharded_case(function):
    SHARDED_CASES.append(function)
    return function


class Paced(Callback):
    """No step is taken before the last save is durable: a store that keeps up, so that none is superseded."""

    def __init__(self, bench) -> None:
        self.bench = bench

    def on_train_batch_start(self, *_):
        if self.bench.handle is not None:
            self.bench.handle.wait("durable", 60)


class Bench:
    """Trainings of one kind, in directories below a folder. The last one's trainer and module stay at hand."""

    def __init__(self, kind, folder) -> None:
        self.kind, self.folder = kind, folder
        self.saver = self.trainer = self.net = None

    def out(self, name="ckptd"):
        return os.path.join(self.folder, name)

    @property
    def handle(self):
        return getattr(self.saver, "handle", None)

    def begin(self, callbacks, *, stock=False, epochs=EPOCHS, scores=()):
        settings = {"job": os.path.basename(self.folder), "start": False}
        if self.kind == "ddp":
            self.saver = None if stock else CkptdCheckpointIO(**settings)
            chosen = {"strategy": "ddp", "plugins": [self.saver] if self.saver else []}
        else:
            self.saver = sharded_strategy(self.kind, None if stock else settings)
            chosen = {"strategy": self.saver}
        pl.seed_everything(1, verbose=False)
        self.trainer = pl.Trainer(
            max_epochs=epochs, accelerator="cpu", devices=2, callbacks=[Seeded(), Paced(self), *callbacks],
            logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=self.folder,
            use_distributed_sampler=False, **chosen,
        )  # fmt: skip
        self.net = Net(sharded=self.kind == "fsdp2", scores=scores)
        return self.trainer

    def fit(self, *callbacks, resume=None, **options):
        trainer = self.begin(callbacks, **options)
        trainer.fit(self.net, data(int(os.environ["RANK"])), ckpt_path=resume)
        barrier()  # with DDP it is rank 0 that waits until all is there
        return state_of(trainer)

    def both(self, scores=(), epochs=EPOCHS, **options):
        """The names that Lightning alone leaves behind, when ckptd leaves the same, and the same in them."""
        for name in ("stock", "ckptd"):
            keeping = ModelCheckpoint(self.out(name), filename="{epoch}-{step}", **options)
            self.fit(keeping, stock=name == "stock", scores=scores, epochs=epochs)
            barrier()
        names = shown(self.out("stock"))
        assert shown(self.out()) == names
        for name in names:
            one, other = (self.read(os.path.join(self.out(which), name)) for which in ("stock", "ckptd"))
            assert same(one, other), name
        return names

    def read(self, path):
        """What Lightning alone finds there: tensors of this rank, and the step."""
        if self.kind == "ddp":
            found = torch.load(path, weights_only=False)
            return found["state_dict"] | {"step": found["global_step"]}
        self.begin([], stock=True)
        net = self.net
        self.trainer.test(net, data(), ckpt_path=path, verbose=False)
        meta = torch.load(os.path.join(path, "meta.pt"), weights_only=False)
        return net.tested | {"step": meta["global_step"]}


def barrier():
    if dist.is_initialized():
        dist.barrier()


def shown(folder):
    if not os.path.isdir(folder):
        return set()
    return {name for name in os.listdir(folder) if not name.startswith(".")}


def same(one, other):
    equal = {key: torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b for key, value in one.items()}
    return one.keys() == other.keys() and all(equal[key](one[key], other[key]) for key in one)


@case
def the_best_are_kept(bench):
    names = bench.both(scores=[3, 1, 2, 5], epochs=4, monitor="score", save_top_k=2)
    assert names == {"epoch=1-step=8.ckpt", "epoch=2-step=12.ckpt"}


@case
def the_highest_are_the_best_if_one_says_so(bench):
    names = bench.both(scores=[3, 1, 2], monitor="score", mode="max", save_top_k=1)
    assert names == {"epoch=0-step=4.ckpt"}


@case
def all_are_kept(bench):
    assert len(bench.both(save_top_k=-1)) == EPOCHS


@case
def only_the_newest_is_kept(bench):
    assert bench.both() == {f"epoch={EPOCHS - 1}-step={4 * EPOCHS}.ckpt"}


@case
def none_is_kept(bench):
    assert bench.both(save_top_k=0) == set()


@case
def the_last_is_a_copy(bench):
    assert "last.ckpt" in bench.both(save_last=True, monitor="score", scores=[1, 2, 3])


@case
def the_last_is_a_link(bench):
    bench.both(save_last="link", save_top_k=-1)
    link = os.path.join(bench.out(), "last.ckpt")
    assert os.readlink(link) == f"epoch={EPOCHS - 1}-step={4 * EPOCHS}.ckpt"


@case
def every_other_epoch_is_saved(bench):
    assert bench.both(every_n_epochs=2, save_top_k=-1, epochs=4) == {"epoch=1-step=8.ckpt", "epoch=3-step=16.ckpt"}


@case
def every_third_step_is_saved(bench):
    names = bench.both(every_n_train_steps=3, save_top_k=-1, epochs=2)
    assert names == {"epoch=0-step=3.ckpt", "epoch=1-step=6.ckpt"}


@case
def the_end_of_training_is_there_when_fit_returns(bench):
    bench.fit(ModelCheckpoint(bench.out(), filename="{epoch}"))
    assert shown(bench.out()) == {f"epoch={EPOCHS - 1}.ckpt"}


@case
def only_weights_are_saved(bench):
    bench.both(save_weights_only=True, save_last=True)
    with pytest.raises((KeyError, CheckpointException)):  # as without ckptd: the optimizer's state is wanting
        bench.fit(resume=os.path.join(bench.out(), "last.ckpt"), epochs=EPOCHS + 1)


@case
def it_resumes_in_the_middle_of_an_epoch(bench):
    keeping = partial(ModelCheckpoint, bench.out(), filename="{step}", every_n_train_steps=3, save_top_k=-1)
    bench.fit(keeping())
    path = os.path.join(bench.out(), "step=6.ckpt")
    alone = bench.fit(stock=True, resume=path)  # which batches the rest of the epoch has is Lightning's own
    assert same(bench.fit(keeping(), resume=path), alone)
    assert bench.trainer.global_step == 4 * EPOCHS


@case
def lightning_alone_resumes_it(bench):
    whole = bench.fit(ModelCheckpoint(bench.out(), filename="{epoch}", save_top_k=-1))
    path = os.path.join(bench.out(), "epoch=0.ckpt")
    assert same(bench.fit(stock=True, resume=path), whole)


@case
def it_resumes_what_lightning_alone_wrote(bench):
    keeping = ModelCheckpoint(bench.out(), filename="{epoch}", save_top_k=-1)
    whole = bench.fit(keeping, stock=True)
    assert same(bench.fit(resume=os.path.join(bench.out(), "epoch=0.ckpt")), whole)


@case
def the_last_is_resumed(bench):
    keeping = partial(ModelCheckpoint, bench.out(), filename="{epoch}", save_last=True)
    whole = bench.fit(keeping())
    bench.out = partial(os.path.join, bench.folder, "again")
    bench.fit(keeping(), epochs=2)
    assert same(bench.fit(keeping(), resume="last"), whole)


@case
def to_resume_the_last_where_there_is_none_begins_anew(bench):
    whole = bench.fit()
    assert same(bench.fit(ModelCheckpoint(bench.out(), save_last=True), resume="last"), whole)


@case
def the_best_is_tested(bench):
    bench.fit(ModelCheckpoint(bench.out(), filename="{epoch}", monitor="score", save_last=True), scores=[2, 1, 3])
    for word, name in (("best", "epoch=1.ckpt"), ("last", "last.ckpt")):
        bench.trainer.test(bench.net, data(), ckpt_path=word, verbose=False)
        tested = bench.net.tested
        kept = bench.trainer, bench.net
        wanted = bench.read(os.path.join(bench.out(), name))
        bench.trainer, bench.net = kept
        wanted.pop("step")
        assert same(wanted, {name.removeprefix("module."): value for name, value in tested.items()}), word


@case
def callbacks_get_their_state_back(bench):
    options = {"filename": "{epoch}", "monitor": "score", "save_top_k": 1, "save_last": True}
    bench.fit(ModelCheckpoint(bench.out(), **options), scores=[1, 2], epochs=2)
    keeping = ModelCheckpoint(bench.out(), **options)
    bench.fit(keeping, scores=[1, 2, 3], resume=os.path.join(bench.out(), "last.ckpt"))
    assert os.path.basename(keeping.best_model_path) == "epoch=0.ckpt"
    assert shown(bench.out()) == {"epoch=0.ckpt", "last.ckpt"}


class Watched(Callback):
    """What lies in the folder, from the first directory on, as often as it can be looked at."""

    def __init__(self, bench) -> None:
        self.bench, self.seen, self.over = bench, set(), threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)

    def on_train_start(self, trainer, module):
        self.thread.start()

    def on_train_end(self, trainer, module):
        self.over.set()
        self.thread.join()

    def _look(self):
        while not self.over.is_set():
            names = frozenset(shown(self.bench.out()))
            if names or self.seen:
                self.seen.add(names)
            time.sleep(0.001)


@sharded_case
def what_is_wrong_is_told_before_the_training(bench):
    trainer = bench.begin([])
    bench.saver._ckptd_settings["layout"] = "round"
    with pytest.raises(ConfigError, match="round"):
        trainer.fit(bench.net, data(int(os.environ["RANK"])))
    assert trainer.global_step == 0


@sharded_case
def nothing_goes_before_the_next_is_there(bench):
    watched = Watched(bench)
    bench.fit(ModelCheckpoint(bench.out(), filename="{epoch}"), watched)
    assert frozenset() not in watched.seen
    assert {"epoch=0.ckpt"} in watched.seen
    assert shown(bench.out()) == {"epoch=2.ckpt"}


@sharded_case
def of_two_places_of_one_step_there_is_one_save(bench):
    bench.fit(ModelCheckpoint(bench.out(), filename="{epoch}", save_last=True), epochs=1)
    places = [os.path.join(bench.out(), name) for name in ("epoch=0.ckpt", "last.ckpt")]
    one, other = (origin_of(place) for place in places)
    assert one == other
    assert one is not None
    assert same(*map(bench.read, places))


class SavesTwice(Callback):
    """At the end of the first epoch, before and after a change that no step of the training made."""

    def __init__(self, bench, change) -> None:
        self.bench, self.change, self.wanted = bench, change, None

    def on_train_epoch_end(self, trainer, module):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(os.path.join(self.bench.out(), "before.ckpt"))
            self.change(trainer)
            trainer.save_checkpoint(os.path.join(self.bench.out(), "after.ckpt"))


class Sees(Callback):
    """What a training begins with."""

    def on_train_start(self, trainer, module):
        self.rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        self.weights = {name: value.detach().clone() for name, value in module.named_parameters()}


def swap_weights(trainer):
    for parameter in trainer.model.parameters():
        data = getattr(parameter.data, "_local_tensor", parameter.data)
        data.copy_(data * 2)  # as callbacks of averages do it: no version counts that


def change_rate(trainer):
    for group in trainer.optimizers[0].param_groups:
        group["lr"] = 0.125


def begins_with(bench, name):
    seen = Sees()
    bench.fit(seen, stock=True, resume=os.path.join(bench.out(), name))
    return seen


@case
def weights_swapped_between_two_saves_of_a_step_are_saved(bench):
    bench.fit(SavesTwice(bench, swap_weights), epochs=1)
    before, after = (begins_with(bench, name).weights for name in ("before.ckpt", "after.ckpt"))
    assert all(torch.equal(local(before[name]) * 2, local(after[name])) for name in before)


@case
def a_rate_changed_between_two_saves_of_a_step_is_saved(bench):
    bench.fit(SavesTwice(bench, change_rate), epochs=1)
    assert begins_with(bench, "after.ckpt").rates == [0.125]
    assert begins_with(bench, "before.ckpt").rates != [0.125]


def local(tensor):
    return getattr(tensor, "_local_tensor", tensor)


class Raises(Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 6:
            raise RuntimeError("on purpose")


@case
def an_exception_is_saved(bench):
    catching = OnExceptionCheckpoint(bench.out())
    with pytest.raises((RuntimeError, SystemExit)):
        bench.fit(catching, Raises())
    barrier()
    assert shown(bench.out()) == {"on_exception.ckpt"}
    alone = bench.fit(stock=True, resume=catching.ckpt_path)
    assert same(bench.fit(resume=catching.ckpt_path), alone)


@case
def an_exception_is_saved_by_the_checkpoint_callback(bench):
    with pytest.raises((RuntimeError, SystemExit)):
        bench.fit(ModelCheckpoint(bench.out(), filename="{step}", save_on_exception=True), Raises())
    barrier()
    assert "step=6.ckpt" in shown(bench.out())


class SavesItself(Callback):
    def __init__(self, path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer, module):
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)


@case
def a_callback_saves(bench):
    path = os.path.join(bench.out(), "own.ckpt")
    bench.fit(SavesItself(path))
    bench.fit(SavesItself(os.path.join(bench.out("stock"), "own.ckpt")), stock=True)
    assert same(bench.read(path), bench.read(os.path.join(bench.out("stock"), "own.ckpt")))


@case
def the_user_saves_after_training(bench):
    whole = bench.fit()
    path = os.path.join(bench.out(), "own.ckpt")
    bench.trainer.save_checkpoint(path)
    bench.trainer.strategy.teardown()
    barrier()
    assert same(bench.fit(stock=True, resume=path), whole)


@case
def the_same_name_is_written_again(bench):
    keeping = partial(ModelCheckpoint, bench.out(), filename="same", every_n_epochs=1, enable_version_counter=False)
    bench.fit(keeping())
    assert shown(bench.out()) == {"same.ckpt"}
    assert bench.read(os.path.join(bench.out(), "same.ckpt"))["step"] == 4 * EPOCHS


def main():
    torch.set_num_threads(1)
    folder, kind, *only = sys.argv[1:]
    for each in CASES + SHARDED_CASES * (kind != "ddp"):
        name = each.__name__
        if only and name not in only:
            continue
        try:
            each(Bench(kind, os.path.join(folder, name)))
            print(f"rank {os.environ['RANK']}: {name} passed", flush=True)
        except BaseException:
            print(f"rank {os.environ['RANK']}: {name} FAILED", flush=True)
            traceback.print_exc()
            sys.stdout.flush()
            os._exit(1)  # the other rank may be elsewhere: it hears of it
        barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that ends


if __name__ == "__main__":
    main()
