#!/usr/bin/env bash
# transformers 5.24.0: generate() fails for T5s with more decoder than encoder layers.
#
# Expected: the same tokens with a cache, which is the default, as without one. Seen: with a cache,
# an IndexError, because the cache is made with the encoder's number of layers. Published models with
# more decoder layers: google/t5-efficient-tiny-dl6, -dl8 and others of their kind.
#
#   use_cache=False: [0, 41, 41, 41, 41]
#   use_cache=True: IndexError: list index out of range
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0
venv/bin/python - <<'PY' 2>errors || { cat errors >&2; exit 1; }
import torch
from transformers import T5Config, T5ForConditionalGeneration

torch.manual_seed(0)
sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4}
layers = {"num_layers": 2, "num_decoder_layers": 4}
model = T5ForConditionalGeneration(T5Config(**sizes, **layers, decoder_start_token_id=0)).eval()
source = torch.tensor([[5, 9, 20, 1]])
print("use_cache=False:", model.generate(source, max_new_tokens=4, use_cache=False)[0].tolist())
try:
    model.generate(source, max_new_tokens=4)
except IndexError as error:
    print("use_cache=True: IndexError:", error)
else:
    raise SystemExit("generate() works with a cache now")
PY
