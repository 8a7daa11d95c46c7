#!/usr/bin/env bash
# transformers 5.24.0: T5Tokenizer drops the byte fallback of a spiece.model.
#
# Expected: T5Tokenizer has the tokens of the sentencepiece model that it is made from. Seen: if
# that model has byte fallback (MADLAD-400's has), sentencepiece writes a character that it does not
# know as its bytes, but T5Tokenizer as <unk>, so the text cannot be decoded again.
#
#   sentencepiece  [259, 264, 262, 260, 259, 234, 142, 147] -> the 狐
#   T5Tokenizer    [259, 264, 262, 260, 259, 2] -> the <unk>
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0 tokenizers==0.23.3 sentencepiece==0.2.3 protobuf==7.36.2
venv/bin/python - <<'PY' 2>errors || { cat errors >&2; exit 1; }
import sentencepiece
from transformers import T5Tokenizer

with open("text.txt", "w") as file:
    file.write("the quick brown fox jumps over the lazy dog\n" * 100)
sentencepiece.SentencePieceTrainer.train(
    input="text.txt", model_prefix="spiece", vocab_size=300, hard_vocab_limit=False,
    byte_fallback=True, pad_id=0, eos_id=1, unk_id=2, bos_id=-1,
)
processor = sentencepiece.SentencePieceProcessor(model_file="spiece.model")
tokenizer = T5Tokenizer.from_pretrained(".", extra_ids=0)
text = "the 狐"
expected, seen = processor.encode(text), tokenizer(text, add_special_tokens=False).input_ids
print("sentencepiece ", expected, "->", processor.decode(expected))
print("T5Tokenizer   ", seen, "->", tokenizer.decode(seen))
assert processor.decode(expected) == text
assert tokenizer.unk_token_id in seen and seen != expected, "T5Tokenizer has bytes now"
PY
