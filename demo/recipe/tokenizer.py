"""Trains the sentencepiece model and wraps it as a T5 tokenizer.

Unigram pieces with byte fallback, so that any text survives; pad 0, eos 1, unk 2 as in T5. There
are no sentinel tokens: the models are trained on two tasks from scratch, not by span corruption.
"""

import io
import itertools
import json
from pathlib import Path

import sentencepiece
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast, T5Tokenizer

from demo.recipe import corpus

VOCAB_SIZE = 3072
SENTENCES = 60_000
FILES = ("spiece.model", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def train(
    folder: Path, seed: int, sentences: int = SENTENCES, vocab_size: int = VOCAB_SIZE
) -> None:
    """Writes spiece.model and the tokenizer files of transformers into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:  # an old tokenizer.json would win over the new spiece.model
        (folder / name).unlink(missing_ok=True)
    stream = itertools.islice(corpus.examples(f"tokenizer {seed}"), sentences)
    texts = itertools.chain.from_iterable((e.source, e.target) for e in stream)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=texts,
        model_writer=model,
        model_type="unigram",
        vocab_size=vocab_size,
        character_coverage=1.0,
        byte_fallback=True,
        seed_sentencepiece_size=30_000,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        pad_piece="<pad>",
        eos_piece="</s>",
        unk_piece="<unk>",
        num_threads=2,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    path = folder / "spiece.model"
    path.write_bytes(model.getvalue())
    _wrap(folder)


def _wrap(folder: Path) -> None:
    """Writes the transformers files for spiece.model.

    transformers' own T5Tokenizer switches byte fallback off, so the tokenizer that it derives is
    saved as a general one with byte fallback on; tests compare it with sentencepiece itself.
    """
    derived = T5Tokenizer.from_pretrained(folder, extra_ids=0)
    backend = json.loads(derived.backend_tokenizer.to_str())
    backend["model"]["byte_fallback"] = True
    backend["decoder"] = {
        "type": "Sequence",
        "decoders": [{"type": "ByteFallback"}, backend["decoder"]],
    }
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(backend)),
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(folder)
    special = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n")
