"""A small Llama on random tokens, for Hugging Face's Trainer and for Accelerate: alike wherever it is made."""

import os
import random
import signal

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

VOCABULARY, LENGTH, ROWS = 64, 16, 48


def make_model(width=32):
    """With dropout, so that each step draws random numbers, and tied weights, which safetensors has once."""
    set_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        attention_dropout=0.2,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def make_tokenizer():
    words = {f"w{number}": number for number in range(VOCABULARY)}
    special = {"unk_token": "w1", "pad_token": "w0"}
    tokenizer = Tokenizer(WordLevel(words, unk_token=special["unk_token"]))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def make_rows(seed=5, rows=ROWS):
    tokens = torch.randint(1, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]


def flat(value, name=""):
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        return {name: value}
    return {key: leaf for at, inner in items for key, leaf in flat(inner, f"{name}.{at}").items()}


def random_states():
    numpy = np.random.get_state()[1].tolist()  # noqa: NPY002 - what Trainer saves
    return {"python": random.getstate(), "numpy": numpy, "torch": torch.get_rng_state()}


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def difference(one, other):
    """The keys of two flat states that differ."""
    assert one.keys() == other.keys()
    pairs = ((key, one[key], other[key]) for key in one)
    return [key for key, a, b in pairs if not (torch.equal(a, b) if torch.is_tensor(a) else a == b)]
