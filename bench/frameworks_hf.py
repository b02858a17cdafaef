"""``python -m bench.frameworks_hf``: how long Trainer and Accelerate stand still for a save, stock and with ckptd.

Ranks on this machine train a Llama with DDP over gloo, on CPUs. At each save both savers have their turn, in the same
process, the stock one first, and only when what was saved before is durable and written back. Seconds are of the
slowest rank, the median of all saves but the first, which also waits for memory. The bar: a third of the stock saver's.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from bench.node import Node, scratch

BAR = 1 / 3
_CASES = ("Trainer", "Accelerate")
_LIMIT_S = 900
_VOCABULARY, _LENGTH = 2048, 32
_TURNS: dict[str, list[float]] = {"stock": [], "ckptd": []}


def _model(width: int, layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - may not be installed

    shape = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    return LlamaForCausalLM(LlamaConfig(vocab_size=_VOCABULARY, num_attention_heads=8, **shape))


def _rows() -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(0, _VOCABULARY, (64, _LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in rows]


def _turn(name: str, save: Callable[[], object]) -> None:
    """Runs one saver when all ranks are there, and notes the slowest rank's seconds."""
    os.sync()
    dist.barrier()
    start = time.perf_counter()
    save()
    taken = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    _TURNS[name].append(taken.item())


def _trainer(out: Path, width: int, layers: int, saves: int) -> None:
    from transformers import Trainer, TrainingArguments  # noqa: PLC0415 - may not be installed

    from ckptd_client.integrations.hf import CkptdTrainerMixin  # noqa: PLC0415

    class Both(CkptdTrainerMixin, Trainer):  # type: ignore[misc]
        def _save_checkpoint(self: Any, model: Any, trial: Any) -> None:
            ours: Any = super()
            self.ckptd_client.wait("durable")
            self._ckptd_saving = str(out / "stock")
            _turn("stock", lambda: Trainer._save_checkpoint(self, model, trial))  # noqa: SLF001 - the one to compare with
            self._ckptd_saving = ""
            if self.args.should_save:
                shutil.rmtree(out / "stock")
            _turn("ckptd", lambda: ours._save_checkpoint(model, trial))  # noqa: SLF001

    arguments = TrainingArguments(
        output_dir=str(out / "trainer"),
        use_cpu=True,
        per_device_train_batch_size=1,
        max_steps=saves,
        save_steps=1,
        save_total_limit=1,
        report_to=[],
        disable_tqdm=True,
    )
    Both(model=_model(width, layers), args=arguments, train_dataset=_rows()).train()


def _accelerate(out: Path, width: int, layers: int, saves: int) -> None:
    from accelerate import Accelerator  # noqa: PLC0415 - may not be installed

    from ckptd_client.integrations.accelerate import CkptdAccelerator  # noqa: PLC0415

    accelerator: Any = CkptdAccelerator(cpu=True)
    model = _model(width, layers)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(_rows(), batch_size=1)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for number, batch in zip(range(saves), loader, strict=False):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        stock, ours = str(out / "stock"), str(out / f"accelerate-{number}")
        _turn("stock", lambda: Accelerator.save_state(accelerator, stock))  # noqa: B023 - called at once
        if accelerator.is_main_process:
            shutil.rmtree(stock)
        _turn("ckptd", lambda: accelerator.save_state(ours))  # noqa: B023 - called at once
        accelerator._ckptd.settle()  # noqa: SLF001
    accelerator.end_training()


def _rank(case: str, out: Path, width: int, layers: int, saves: int) -> None:
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    run = {"Trainer": _trainer, "Accelerate": _accelerate}[case]
    run(out, width, layers, saves)
    if os.environ["RANK"] == "0":
        (out / "result.json").write_text(json.dumps(_TURNS))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that ends


def _measure(case: str, arguments: argparse.Namespace) -> dict[str, list[float]]:
    with scratch(arguments.store) as (shm, disk):
        node = Node(shm, disk / "store")
        node.store.mkdir()
        node.start()
        try:
            _launch(case, arguments, node, disk)
            found: dict[str, list[float]] = json.loads((disk / "result.json").read_text())
            return found
        finally:
            node.close()


def _launch(case: str, arguments: argparse.Namespace, node: Node, disk: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(arguments.ranks), "LOCAL_WORLD_SIZE": str(arguments.ranks)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    shared |= {"CKPTD_ARENA": str(node.arena), "CKPTD_STORE": str(node.store), "CKPTD_JOB": "bench"}
    shape = [str(arguments.width), str(arguments.layers), str(arguments.saves)]
    command = [sys.executable, "-m", "bench.frameworks_hf", "--rank", case, str(disk), *shape]
    log = disk / "ranks.log"
    with log.open("wb") as file:
        ranks = [
            subprocess.Popen(
                command, env=os.environ | shared | {"RANK": str(n), "LOCAL_RANK": str(n)}, stdout=file, stderr=file
            )
            for n in range(arguments.ranks)
        ]
        try:
            status = [rank.wait(_LIMIT_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    if any(status):
        raise RuntimeError(f"{case} ended {status}:\n{log.read_text()[-4000:]}")


def main() -> None:
    """Prints the table."""
    if sys.argv[1:2] == ["--rank"]:
        case, out, *shape = sys.argv[2:]
        _rank(case, Path(out), *map(int, shape))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path, default=Path(), help="where the checkpoints go; default here")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--saves", type=int, default=6)
    arguments = parser.parse_args()
    table = Table("framework", "stock saver", "with ckptd", "share", "first save, stock", "with ckptd")
    for case in _CASES:
        found = _measure(case, arguments)
        stock, ours = (statistics.median(found[name][1:]) for name in ("stock", "ckptd"))
        verdict = "" if ours <= stock * BAR else f" (missed: {BAR:.2f})"
        first = [f"{found[name][0]:.3f} s" for name in ("stock", "ckptd")]
        table.add_row(case, f"{stock:.3f} s", f"{ours:.3f} s", f"{ours / stock:.2f}{verdict}", *first)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
