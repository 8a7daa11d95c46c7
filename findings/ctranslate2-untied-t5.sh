#!/usr/bin/env bash
# CTranslate2 4.8.5 with transformers 5.24.0: the converter scales the logits of untied T5s.
#
# Expected: a T5 whose config.json has "tie_word_embeddings": false (FLAN-T5, T5 v1.1, ByT5 …) has
# the same scores in CTranslate2 as in transformers. Seen: transformers 5 sets the attribute
# `tie_word_embeddings` of every T5Config to True and keeps the file's word in
# `scale_decoder_outputs`; the converter reads the former, so it multiplies the decoder's output
# by d_model^-0.5. Greedy text stays the same; scores, beams and samples do not.
#
#   transformers  [-4.927, -8.864, -9.962, -3.814]
#   CTranslate2   [-4.094, -4.58, -4.708, -3.871]
#   transformers's logits * d_model^-0.5  [-4.094, -4.58, -4.708, -3.871]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0 ctranslate2==4.8.5
venv/bin/python - <<'PY' 2>errors || { cat errors >&2; exit 1; }
import json

import ctranslate2
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

torch.manual_seed(0)
sizes = {"vocab_size": 64, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
config = T5Config(**sizes, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
model = T5ForConditionalGeneration(config)
model.lm_head.weight = torch.nn.Parameter(torch.randn(64, 64) * 0.3)
model.save_pretrained("model")
with open("model/config.json") as file:  # as the files of FLAN-T5 are, saved by transformers 4
    saved = json.load(file) | {"tie_word_embeddings": False, "decoder_start_token_id": 0}
del saved["scale_decoder_outputs"]
with open("model/config.json", "w") as file:
    json.dump(saved, file)
names = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, 64)}
tokenizer = Tokenizer(models.WordLevel(names, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
special = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "</s>"}
PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained("model")

model = T5ForConditionalGeneration.from_pretrained("model").eval()
source, target = torch.tensor([[5, 9, 20, 1]]), [7, 8, 9, 1]
with torch.no_grad():
    logits = model(source, decoder_input_ids=torch.tensor([[0, 7, 8, 9]])).logits[0]
rows = range(len(target))
ours = logits.log_softmax(-1)[rows, target]
scaled = (logits * 64**-0.5).log_softmax(-1)[rows, target]
ctranslate2.converters.TransformersConverter("model").convert("converted")
translator = ctranslate2.Translator("converted")
words = [["w5", "w9", "w20", "</s>"]], [["w7", "w8", "w9"]]
theirs = torch.tensor(translator.score_batch(*words)[0].log_probs)
for name, row in (("transformers", ours), ("CTranslate2", theirs)):
    print(name, [round(x, 3) for x in row.tolist()])
print("transformers's logits * d_model^-0.5", [round(x, 3) for x in scaled.tolist()])
assert not torch.allclose(theirs, ours, atol=0.1), "CTranslate2 no longer scales"
assert torch.allclose(theirs, scaled, atol=1e-3), "CTranslate2 does something else now"
PY
