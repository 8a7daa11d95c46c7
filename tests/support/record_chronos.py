"""Records how chronos-forecasting turns series into tokens and back: tests/files/chronos.json.

Run it in an environment of its own, as the package needs pandas and accelerate:
`pip install chronos-forecasting==2.3.2 && python tests/support/record_chronos.py`.
"""

import json
from importlib.metadata import version
from pathlib import Path

import numpy as np

FILE = Path(__file__).resolve().parents[1] / "files" / "chronos.json"
CHRONOS = {  # of the config.json of amazon/chronos-t5-tiny to -large
    "tokenizer_class": "MeanScaleUniformBins",
    "tokenizer_kwargs": {"low_limit": -15.0, "high_limit": 15.0},
    "n_tokens": 4096, "n_special_tokens": 2, "pad_token_id": 0, "eos_token_id": 1,
    "use_eos_token": True, "model_type": "seq2seq", "context_length": 512,
    "prediction_length": 64, "num_samples": 20, "temperature": 1.0, "top_k": 50, "top_p": 1.0,
}  # fmt: skip


def series_of(number: int) -> list[float]:
    """Returns a made-up series; None is a missing value."""
    rng = np.random.default_rng(number)
    x = np.cumsum(rng.normal(size=600 if number == 0 else int(rng.integers(5, 60))))
    kinds = {1: 0 * x, 2: 0 * x - 7.3, 3: -abs(x), 4: x * 1e9, 5: x * 1e-9, 6: x**5, 7: abs(x) > 1}
    x = kinds.get(number % 8, x)
    missing = rng.random(len(x)) < (0.3 if number % 3 == 0 else 0)
    return [None if gone else float(f"{v:.4g}") for v, gone in zip(x, missing, strict=True)]


def main() -> None:
    import torch
    from chronos import ChronosConfig

    tokenizer, records = ChronosConfig(**CHRONOS).create_tokenizer(), []
    for number in range(20):
        series = series_of(number)
        values = torch.tensor([np.nan if x is None else x for x in series])
        ids, mask, scale = tokenizer.context_input_transform(values[None])
        back = tokenizer.output_transform(ids[None, :, -6:-1], scale)[0, 0]
        record = {"series": series, "ids": ids[0].tolist(), "mask": mask[0].int().tolist()}
        records.append(record | {"last_values": back.tolist()})
    name = "chronos-forecasting"
    FILE.write_text(json.dumps({"made_by": f"{name} {version(name)}", "records": records}) + "\n")


if __name__ == "__main__":
    main()
