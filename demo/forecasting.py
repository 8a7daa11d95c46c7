"""Times forecasts (docs/forecasting.md) at Chronos-T5's shapes.

`python -m demo.forecasting large` times 20 samples of 64 tokens with random weights of
chronos-t5-large's shape, here and in torch; `tiny`, `mini`, `small` and `base` are the other
shapes. Needs requirements/benchmark.txt.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import T5Config, T5ForConditionalGeneration

from mlx_t5.backend import device_name, on_cpu
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.disk import BUNDLED
from mlx_t5.model import load

DOCS = BUNDLED.parent / "docs"
CHRONOS: dict[str, Any] = {  # of the config.json of amazon/chronos-t5-tiny to -large
    "tokenizer_class": "MeanScaleUniformBins",
    "tokenizer_kwargs": {"low_limit": -15.0, "high_limit": 15.0},
    "n_tokens": 4096, "n_special_tokens": 2, "pad_token_id": 0, "eos_token_id": 1,
    "use_eos_token": True, "model_type": "seq2seq", "context_length": 512,
    "prediction_length": 64, "num_samples": 20, "temperature": 1.0, "top_k": 50, "top_p": 1.0,
}  # fmt: skip
SHAPES = {  # layers, d_model, d_ff, heads
    "tiny": (4, 256, 1024, 4), "mini": (4, 384, 1536, 8), "small": (6, 512, 2048, 8),
    "base": (12, 768, 3072, 12), "large": (24, 1024, 4096, 16),
}  # fmt: skip


def new_model(shape: tuple[int, int, int, int], chronos: dict[str, Any] = CHRONOS, **more) -> Any:
    """Returns a random model of transformers with `chronos` in its config."""
    layers, d_model, d_ff, heads = shape
    sizes = {"num_layers": layers, "d_model": d_model, "d_ff": d_ff, "num_heads": heads, "d_kv": 64}
    tokens = {"vocab_size": chronos["n_tokens"], "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**sizes, **tokens, chronos_config=chronos, **more))


def blocks() -> list[str]:
    """Returns the Python blocks of docs/forecasting.md: its functions, then their use."""
    page = (DOCS / "forecasting.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def timed(name: str, call: Callable[..., Any], shortest: str, longest: str) -> Any:
    """Prints the seconds of a forecast; the two names are those of the options for its length."""
    call(**{shortest: 8, longest: 8})  # warms up
    started = time.perf_counter()
    result = call(**dict.fromkeys((shortest, longest), CHRONOS["prediction_length"]))
    print(f"{name:36} {time.perf_counter() - started:7.2f} s", end="", flush=True)
    return result


def measure(size: str) -> None:
    """Prints the seconds of a forecast by random weights, in torch and here.

    Random models of different shapes hardly ever agree, so nearly no proposal is kept, which is the
    worst case of speculation; with delta 1 every proposal is kept, which is the best one.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "float32" if on_cpu() else "bfloat16"
    print(f"chronos-t5-{size}'s shape, {dtype}, {device_name()}; torch: {dtype}, {device}")
    torch.manual_seed(0)
    ids = torch.randint(3, CHRONOS["n_tokens"], (1, CHRONOS["context_length"] + 1))
    top_k, samples = CHRONOS["top_k"], CHRONOS["num_samples"]
    with tempfile.TemporaryDirectory() as folder:
        for name, shape in (("draft", SHAPES["tiny"]), ("target", SHAPES[size])):
            reference = new_model(shape, initializer_factor=0.05).eval()
            reference.save_pretrained(f"{folder}/{name}")
        target, draft = (load(f"{folder}/{name}", dtype)[0] for name in ("target", "draft"))
    reference = reference.to(device, getattr(torch, dtype))
    inputs = {"input_ids": ids.to(device), "attention_mask": torch.ones_like(ids).to(device)}
    sampling = {"do_sample": True, "top_k": top_k, "num_return_sequences": samples}
    by_torch = partial(reference.generate, **inputs, **sampling)
    timed("torch", by_torch, "min_new_tokens", "max_new_tokens")
    print()
    for name, proposer, number, delta in (
        ("regular", None, "auto", 0),
        ("auto, nearly nothing kept", draft, "auto", 0),
        ("4 proposals, nearly nothing kept", draft, 4, 0),
        ("4 proposals, all kept (delta 1)", draft, 4, 1),
    ):
        decoder = SpeculativeDecoder(target, proposer, num_draft=number, delta=delta)
        sampling = {"temp": CHRONOS["temperature"], "top_k": top_k, "num_samples": samples}
        ours = partial(decoder.generate, ids[0].tolist(), **sampling)
        stats = [result.stats for result in timed(name, ours, "min_tokens", "max_tokens")]
        print(f", {sum(s.accepted for s in stats)} of {sum(s.drafted for s in stats)} kept")


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in SHAPES:
        measure(sys.argv[1])
    else:
        raise SystemExit(f"error: name one of {', '.join(SHAPES)}")
