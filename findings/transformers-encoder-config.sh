#!/usr/bin/env bash
# transformers 5.24.0: T5EncoderModel(model.config) keeps that model from generating.
#
# Expected: an encoder made with the configuration of a whole model leaves that model as it was, as
# UMT5EncoderModel does. Seen: T5EncoderModel and MT5EncoderModel write is_encoder_decoder=False and
# use_cache=False into the configuration that they get, so generate() of the whole model fails, also
# after save_pretrained and from_pretrained, because config.json has these values.
#
#   T5: generate() of the whole model ValueError, saved and loaded again ValueError
#   MT5: generate() of the whole model ValueError, saved and loaded again ValueError
#   UMT5: generate() of the whole model ok, saved and loaded again ok
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0
venv/bin/python - <<'PY' 2>errors || { cat errors >&2; exit 1; }
import torch
import transformers

sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
source = torch.tensor([[5, 9, 20, 1]])


def generating(model):
    try:
        model.generate(source, max_new_tokens=4)
    except ValueError:
        return "ValueError"
    return "ok"


for name, expected in [("T5", "ValueError"), ("MT5", "ValueError"), ("UMT5", "ok")]:
    config = getattr(transformers, f"{name}Config")(**sizes, decoder_start_token_id=0)
    whole_class = getattr(transformers, f"{name}ForConditionalGeneration")
    model = whole_class(config).eval()
    assert generating(model) == "ok"
    getattr(transformers, f"{name}EncoderModel")(model.config)
    after = generating(model)
    model.save_pretrained("whole")
    again = generating(whole_class.from_pretrained("whole"))
    print(f"{name}: generate() of the whole model {after}, saved and loaded again {again}")
    assert after == again == expected, "that has changed"
PY
