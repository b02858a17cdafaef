"""Hugging Face, a Llama under DDP: Trainer's own saver and CkptdTrainerMixin's, Accelerate's and CkptdAccelerator's."""
# ruff: noqa: SLF001 - Trainer has its saver private, for classes derived from it

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.trainers import Measure, Pair, Way, timed

NEEDS = "transformers"
_VOCABULARY, _LENGTH, _WIDTH = 2048, 32, 512


def _llama(nbytes: int) -> Any:
    """nbytes: of parameters and moments, which rank 0 saves for all."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - not where it is not measured

    parameters = nbytes // (3 * 4) - 2 * _VOCABULARY * _WIDTH
    layers = max(1, parameters // (16 * _WIDTH * _WIDTH))
    shape = {"hidden_size": _WIDTH, "intermediate_size": 4 * _WIDTH, "num_hidden_layers": layers}
    return LlamaForCausalLM(LlamaConfig(vocab_size=_VOCABULARY, num_attention_heads=8, **shape))


def _rows() -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(0, _VOCABULARY, (8, _LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in rows]


def _way(name: str, save: Callable[[int], object], wait: Callable[[], object], folder: Path) -> Way:
    def settle() -> float:
        wait()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        return 0.0

    return Way(name, lambda step: timed(lambda: save(step)), settle)


def trainer(nbytes: int, folder: Path, measure: Measure) -> None:
    """nbytes: as _llama's."""
    from transformers import Trainer, TrainingArguments  # noqa: PLC0415

    from ckptd_client.integrations.hf import CkptdTrainerMixin  # noqa: PLC0415

    class Both(CkptdTrainerMixin, Trainer):  # type: ignore[misc]
        """Measures both where it would save."""

        def _save_checkpoint(self: Any, model: Any, trial: Any) -> None:
            ours: Any = super()

            def by_trainer(step: int) -> None:
                self.state.global_step, self._ckptd_saving = step, str(folder / "stock")
                Trainer._save_checkpoint(self, model, trial)
                self._ckptd_saving = ""

            def by_ckptd(step: int) -> None:
                self.state.global_step = step
                ours._save_checkpoint(model, trial)

            stock = _way("Trainer", by_trainer, lambda: None, folder / "stock")
            mixed = _way("CkptdTrainerMixin", by_ckptd, lambda: self.ckptd_client.wait("durable"), folder / "stock")
            measure(Pair("Hugging Face Trainer", stock, mixed))

    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        use_cpu=True,
        per_device_train_batch_size=1,
        max_steps=1,
        save_steps=1,
        save_total_limit=1,
        report_to=[],
        disable_tqdm=True,
    )
    Both(model=_llama(nbytes), args=arguments, train_dataset=_rows()).train()


def accelerate(nbytes: int, folder: Path, measure: Measure) -> None:
    """nbytes: as _llama's."""
    from accelerate import Accelerator  # noqa: PLC0415

    from ckptd_client.integrations.accelerate import CkptdAccelerator  # noqa: PLC0415

    accelerator: Any = CkptdAccelerator(cpu=True)
    model = _llama(nbytes)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(_rows(), batch_size=1)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.backward(model(**next(iter(loader))).loss)
    optimizer.step()

    def by_accelerate(_step: int) -> None:
        Accelerator.save_state(accelerator, str(folder / "stock"))

    def by_ckptd(step: int) -> None:
        accelerator.save_state(str(folder / f"accelerate-{step}"))

    stock = _way("save_state", by_accelerate, lambda: None, folder / "stock")

    def settle() -> None:
        accelerator._ckptd.settle()

    ours = _way("CkptdAccelerator", by_ckptd, settle, folder / "stock")
    measure(Pair("Accelerate", stock, ours))
    accelerator.end_training()
