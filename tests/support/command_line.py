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
    """Saves a random T5 whose tokens are bytes, so that a character may have two tokens.

    Only the bytes of some letters are likely, so greedy decoding never ends by itself. The model
    with noise is a draft that mostly agrees with the model without noise.
    """
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    config = {"model_type": "t5", "vocab_size": 384, "tie_word_embeddings": False, **sizes}
    tokenizer = transformers.ByT5Tokenizer()
    letters = sorted(set(tokenizer.encode("abcdefghijklmnopqrstuvwxyzàáâãçèéê")[:-1]))
    state = checkpoints.random_state(config, noise=noise, seed=32)
    seeds = (torch.Generator().manual_seed(seed) for seed in (2, 3))
    base, offset = (torch.randn(len(letters), 32, generator=seed) for seed in seeds)
    state["lm_head.weight"] = torch.zeros_like(state["shared.weight"])
    state["lm_head.weight"][letters] = 0.5 * (base + noise * offset)
    checkpoints.save(state, folder, config=config)
    tokenizer.save_pretrained(folder)
    return folder


def start(*argv: str, **options) -> subprocess.Popen:
    """Starts the command line in a separate process."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    pipes["env"] = {name: os.environ[name] for name in os.environ if name != "PYTHONUNBUFFERED"}
    return subprocess.Popen([sys.executable, str(ROOT / "main.py"), *argv], **pipes)
