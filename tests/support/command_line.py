"""Runs the command line in a process of its own, on small random models."""

import os
import subprocess
import sys
from pathlib import Path

import torch
import transformers

import checkpoints
import main

ROOT = Path(main.__file__).parent


def byte_model(folder: Path, noise: float = 0.0) -> Path:
    """Saves a random T5 that spells in bytes, so that a character may have two tokens.

    Only bytes of some letters are likely, so greedy decoding never ends by itself. With noise it
    is a draft that mostly agrees with the model without noise.
    """
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(vocab_size=384, decoder_start_token_id=0, **sizes)
    tokenizer = transformers.ByT5Tokenizer()
    letters = sorted(set(tokenizer.encode("abcdefghijklmnopqrstuvwxyzàáâãçèéê")[:-1]))
    own, others = (torch.Generator().manual_seed(seed) for seed in (0, 1))
    state = {}
    for name, value in transformers.T5ForConditionalGeneration(config).state_dict().items():
        scale = 1.0 if name == "shared.weight" or value.ndim == 1 else value.shape[-1] ** -0.5
        weight = torch.randn(value.shape, generator=own)
        state[name] = scale * (weight + noise * torch.randn(value.shape, generator=others))
    for name in state:
        if name.endswith("embed_tokens.weight"):
            state[name] = state["shared.weight"].clone()
    head = torch.zeros(config.vocab_size, config.d_model)
    head[letters] = 16 * state["lm_head.weight"][letters]
    state["lm_head.weight"] = head
    checkpoints.save(state, folder, config={**config.to_dict(), "tie_word_embeddings": False})
    tokenizer.save_pretrained(folder)
    return folder


def start(*argv: str, **options) -> subprocess.Popen:
    """Starts the command line in a separate process."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    pipes["env"] = {name: os.environ[name] for name in os.environ if name != "PYTHONUNBUFFERED"}
    return subprocess.Popen([sys.executable, str(ROOT / "main.py"), *argv], **pipes)
