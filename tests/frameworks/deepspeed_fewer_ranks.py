"""Checkpoints of two ranks, loaded by one, with ckptd underneath: deepspeed_fewer_ranks.py <folder>, twice.

On two ranks it saves, on one it runs the cases, from memory and without ckptd.
"""

import os

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero.utils import ZeRORuntimeException
from deepspeed_bench import Bench, Cases, connect, plain, run_cases, same, take_steps
from deepspeed_kinds import PARTITIONED
from deepspeed_parallel_cases import INFO, universal

case, save_case = Cases(), Cases()
GATHERING = {"stage3_gather_16bit_weights_on_model_save": True}
PLAIN, ELASTIC = "plain", "elastic"


def of_job(b, name):
    """A bench of a job of its own, so that ckptd's newest is its one checkpoint."""
    folder = os.path.join(os.path.dirname(b.folder), f"{b.stage}-{b.dtype}-{name}")
    return Bench(folder, connect(os.path.basename(folder)), f"{b.stage}-{b.dtype}")


@save_case
def save(b):
    """A plain checkpoint and an elastic one, the whole weights beside each, and the universal one of the first."""
    for name in (PLAIN, ELASTIC):
        inner = of_job(b, name)
        engine = inner.engine(zero_optimization=GATHERING | {"elastic_checkpoint": name == ELASTIC})
        take_steps(engine)
        inner.save(engine, **INFO)
        engine.save_16bit_model(inner.out("whole"), "model.pt")
        if name == PLAIN:
            universal(inner.out())
        inner.client.close()


def weights(engine):
    """Whole, on the one rank."""
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=hasattr(parameters[0], "ds_id")):
        return plain(dict(engine.module.named_parameters()))


def saved_weights(b):
    found = torch.load(os.path.join(b.out("whole"), "model.pt"))
    del found["seen"]
    return plain(dict(found))


@case
def without_optimizer_states_another_number_of_ranks_loads(b):
    for name in (PLAIN, ELASTIC):
        inner = of_job(b, name)
        found = inner.engine(1)
        inner.load_from_memory(found, load_optimizer_states=False)
        same(weights(found), saved_weights(inner))
        alone = inner.engine(1)
        alone.load_checkpoint(inner.out(), load_optimizer_states=False)
        same(weights(alone), saved_weights(inner))
        inner.client.close()


@case
def optimizer_states_of_another_number_of_ranks_are_refused(b):
    inner = of_job(b, PLAIN)
    with pytest.raises(ZeRORuntimeException):
        inner.load_from_memory(inner.engine(1))
    with pytest.raises(ZeRORuntimeException):
        inner.engine(1).load_checkpoint(inner.out())
    inner.client.close()


@case
def the_universal_checkpoint_fits_another_number_of_ranks(b):
    inner = of_job(b, PLAIN)
    found = inner.engine(1, checkpoint={"load_universal": True})
    with inner.under(found):
        found.load_checkpoint(inner.out(), tag="1_universal")
    same(weights(found), saved_weights(inner))
    take_steps(found)
    inner.client.close()


if __name__ == "__main__":
    run_cases({case if os.environ["WORLD_SIZE"] == "1" else save_case: PARTITIONED})
