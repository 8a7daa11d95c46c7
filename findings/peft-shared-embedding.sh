#!/usr/bin/env bash
# PEFT 0.21.2 with transformers 5.24.0: adapters on T5's embedding `shared` never act.
#
# Expected: an adapter on `shared` changes the output in the same way before and after it is merged,
# as one on `q` does. Seen: T5's two stacks look tokens up in modules of their own, so the adapter
# on `shared` is never called, and neither LoRA nor modules_to_save changes the output. Once merged,
# LoRA changes the embeddings that are tied to `shared`, so the model becomes another one.
#
#   LoRA on q: adapter changes the output True, merging changes it again False
#   LoRA on shared: adapter changes the output False, merging changes it again True
#   modules_to_save shared: adapter changes the output False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0 peft==0.21.2
venv/bin/python - <<'PY' 2>errors || { cat errors >&2; exit 1; }
import torch
from peft import LoraConfig, get_peft_model
from transformers import T5Config, T5ForConditionalGeneration

sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
inputs = {"input_ids": torch.tensor([[5, 9, 20, 1]])}
inputs["decoder_input_ids"] = torch.tensor([[0, 7, 8, 9]])


def new_model():
    torch.manual_seed(0)
    return T5ForConditionalGeneration(T5Config(**sizes)).eval()


@torch.no_grad()
def changes(lora, part):
    """Whether a random adapter changes the output, and whether merging it changes it again."""
    adapted = get_peft_model(new_model(), lora).eval()
    weights = [w for name, w in adapted.named_parameters() if w.requires_grad and part in name]
    assert weights
    for weight in weights:
        weight.normal_(std=0.3)
    before, with_adapter = new_model()(**inputs).logits, adapted(**inputs).logits
    merged = adapted.merge_and_unload()(**inputs).logits
    pairs = (before, with_adapter), (with_adapter, merged)
    return [not torch.allclose(*pair, atol=1e-3) for pair in pairs]


seen = {name: changes(LoraConfig(target_modules=[name]), name) for name in ("q", "shared")}
for name, (acts, again) in seen.items():
    print(f"LoRA on {name}: adapter changes the output {acts}, merging changes it again {again}")
saved, _ = changes(LoraConfig(target_modules=["q"], modules_to_save=["shared"]), "modules_to_save")
print("modules_to_save shared: adapter changes the output", saved)
assert seen == {"q": [True, False], "shared": [False, True]} and not saved, "adapters act now"
PY
