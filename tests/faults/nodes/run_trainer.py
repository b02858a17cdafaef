"""A rank whose bytes say which run, rank and step saved them: each word of each tensor, and a leaf."""

import json
import time
from typing import Any

import torch
import torch.distributed as dist

from tests.faults.nodes.trainer import NodeTrainer

RUN_TRAINER = "tests.faults.nodes.run_trainer:RunTrainer"
_INDEX_BITS, _STEP_BITS, _RANK_BITS = 20, 24, 7  # the rest of a word's 63 bits is the run
_TENSORS = 3
_MOST_OPEN = 8


class RunTrainer(NodeTrainer):
    """Every public method is a call."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._run = 0

    def be(self, run: int) -> None:
        """What is saved from now on is of this run; from 1."""
        self._run = run

    def _state(self, step: int | None) -> dict[str, Any]:
        """What this rank trains at a step of its run; None: a fresh state."""
        count = self._nbytes // 8
        assert count < 1 << _INDEX_BITS
        words = torch.zeros(count, dtype=torch.int64)
        if step is not None:
            mark = ((self._run << _RANK_BITS | self._rank) << _STEP_BITS) | step
            torch.arange(count, out=words)
            words.add_(mark << _INDEX_BITS)
        parts = words.chunk(_TENSORS)
        tensors = {"weight": parts[0].view(torch.float32), "moments": [parts[1].view(torch.bfloat16), parts[2]]}
        return {"model": tensors, "mark": json.dumps([self._run, self._rank, step])}

    def load(self, step: int | None = None) -> dict[str, Any] | None:
        """load into a fresh state, and every [run, rank, step] that its bytes name: one, if it is no mix."""
        state = self._state(None)
        found = self._client.load(state, step)
        if found is None:
            return None
        self._handles, self._told = {}, {}
        words = [state["model"]["weight"], *state["model"]["moments"]]
        words = torch.cat([part.view(torch.int64) for part in words])
        marks = {_parts_of(mark) for mark in torch.unique(words >> _INDEX_BITS).tolist()}
        marks.add(tuple(json.loads(state["mark"])))
        whole = torch.equal(words & ((1 << _INDEX_BITS) - 1), torch.arange(len(words)))
        return {
            "step": found.step,
            "tier": found.tier,
            "notes": found.notes,
            "marks": sorted(marks),
            "intact": whole,
        }

    def wait_or_why(self, step: int, milestone: str, timeout_s: float) -> str:
        """Empty once the save of the step has the milestone, else why it has not."""
        try:
            self.wait(step, milestone, timeout_s)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def train(self, first: int, seconds: float, pause_s: float) -> str:
        """Saves step after step, all ranks in step. Empty, or why it ended early: another rank is gone.

        What save raises, and how long it held up training, goes to the diary.
        """
        step, deadline = first, time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                self.save(step)
                self._say({"step": step, "stall_s": self._handles[step].stall_s})
            except Exception as error:
                self._say({"step": step, "raised": f"{type(error).__name__}: {error}"})
            self._rest(pause_s)
            self._handles = {s: h for s, h in self._handles.items() if s > step - _MOST_OPEN or h.end is None}
            try:
                dist.barrier()
            except RuntimeError as error:
                return str(error)
            step += 1
        return ""

    def _rest(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._client._staging.pump(left)
            self.watch()

    def _say(self, what: dict[str, Any]) -> None:
        with open(self._diary, "a", encoding="utf-8") as file:
            file.write(json.dumps(what) + "\n")


def _parts_of(mark: int) -> tuple[int, int, int]:
    """(run, rank, step)."""
    step, rest = mark & ((1 << _STEP_BITS) - 1), mark >> _STEP_BITS
    return rest >> _RANK_BITS, rest & ((1 << _RANK_BITS) - 1), step
