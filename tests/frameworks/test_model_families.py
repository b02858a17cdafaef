"""Optimizers of torch and others on models of Hugging Face's: what a load gives back is what was saved, to the bit.

Small configurations of five families that share weights, cast, route or normalise each in its own way.
"""

import pytest
import torch

import ckptd_client
from ckptd_client import MismatchError
from tests.unit.client.optimizers import OPTIMIZERS
from tests.unit.client.same import difference

pytestmark = [pytest.mark.frameworks("transformers"), pytest.mark.timeout(400)]
KINDS = sorted(OPTIMIZERS.keys() - {"sparse-adam"})  # which takes sparse gradients only
SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


def gpt2(transformers):
    config = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    return transformers.GPT2LMHeadModel(config)


def llama(transformers):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=True))


def bert(transformers):
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, num_attention_heads=2))


def t5(transformers):
    config = transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config)


def mixtral(transformers):
    config = transformers.MixtralConfig(**SIZES, **HEADS, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config)


def trained(make, kind, dtype, *, seed, steps):
    """A model and its optimizer, after so many steps."""
    import transformers  # noqa: PLC0415 - only where it is installed

    torch.manual_seed(seed)
    model = make(transformers).to(dtype).train()
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    tokens = torch.randint(1, 64, (2, 8))

    def loss():
        optimizer.zero_grad()
        value = model(input_ids=tokens, labels=tokens).loss
        value.backward()
        return value

    for _ in range(steps):
        if kind == "lbfgs":
            optimizer.step(loss)
        else:
            loss()
            optimizer.step()
    if kind == "adamw-capturable":
        optimizer.param_groups[0]["capturable"] = True
    return {"model": model, "optimizer": optimizer}


def refusal(client, target):
    """Why a load does not give back what was saved; empty when it does."""
    try:
        client.load(target)
    except MismatchError as error:
        return error.message
    return ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [gpt2, llama, bert, t5, mixtral], ids=lambda make: make.__name__)
def test_every_optimizer_comes_back_to_the_bit_or_names_the_key(make, dtype, node):
    exact = []
    for kind in KINDS:
        job = f"{make.__name__}-{kind}"
        with ckptd_client.connect(job, store=node.store, arena=node.arena, start=False) as client:
            saved = trained(make, kind, dtype, seed=1, steps=3)
            client.save(saved, 1).wait("staged", 60)
            for steps in (0, 2):
                target = trained(make, kind, dtype, seed=2, steps=steps)
                refused = refusal(client, target)
                assert not refused or "state['optimizer']" in refused
                assert refused or not difference(saved, target)
                exact += [] if refused else [kind]
    assert sorted({*KINDS} - {*exact}) == []
