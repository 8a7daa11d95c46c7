"""Makes small folders with tokenizers in the layouts that publishers used over the years."""

import base64
import json
import random
from pathlib import Path

import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2

TEXTS = [
    "Let's go to the store and buy some groceries including eggs, avocadoes, and bread.",
    "it 's ( fine ) , is n't it ?",
    "Le garçon naïve a mangé un œuf à la maison.",
    "你好，世界! こんにちは 안녕하세요",
    "an emoji 😀, a family 👨‍👩‍👧‍👦 and a flag 🇫🇷",
    "e\u0301 is é here",
    "",
    "😀",
    "Да 🙂",
]
SPECIAL = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
# pad, eos, unk, whether it has byte tokens, and language tokens: t5, mt5 and MADLAD
LAYOUTS = {"t5": (0, 1, 2, False, []), "mt5": (0, 1, 2, True, []),
           "madlad": (1, 2, 0, True, ["<2en>", "<2fr>"]), "odd": (1, 2, 0, False, [])}  # fmt: skip
# The files of each layout. "both": tokenizer.json of transformers 4 beside spiece.model. "resaved":
# saved again by transformers 5, which loses byte tokens and the unknown token.
SPIECE = [f"{layout}{kind}" for layout in LAYOUTS for kind in ("", "-both")]
JSON = [f"{layout}-json" for layout in LAYOUTS]
RESAVED = [f"{layout}-resaved" for layout in ("mt5", "madlad", "odd")]
# Kinds that are not T5's, by their class: vocab.json and merges.txt, vocab.txt, tokenizer.model.
CLASSES = {"roberta": "RobertaTokenizer", "gpt2": "GPT2Tokenizer", "bert": "BertTokenizer",
           "llama": "LlamaTokenizer"}  # fmt: skip


def settings(layout, **more):
    extra = 100 if layout == "t5" else 0  # sentinels
    return {"tokenizer_class": "T5Tokenizer", "extra_ids": extra, **SPECIAL, **more}


def train(folder, layout, **options):
    """Trains a sentencepiece model of a layout and writes its folder."""
    pad, eos, unk, fallback, languages = LAYOUTS[layout]
    write(folder, None, settings(layout))
    words = " ".join(TEXTS[:3]).split()
    lines = [" ".join(random.Random(i).sample(words, 9)) for i in range(400)]
    chosen = {
        "vocab_size": 600, "hard_vocab_limit": False, "model_type": "unigram", "minloglevel": 2,
        "byte_fallback": fallback, "user_defined_symbols": languages,
        "pad_id": pad, "eos_id": eos, "unk_id": unk, "bos_id": -1,
    }  # fmt: skip
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(folder / "spiece"), **chosen | options
    )
    (folder / "spiece.vocab").unlink()


def write(folder, state, own=None, model_type="t5"):
    """Writes a folder with tokenizer.json and tokenizer_config.json, unless they are None."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    for name, content in (("tokenizer.json", state), ("tokenizer_config.json", own)):
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    return folder


def old_json(folder, sentinels):
    """Returns transformers 4's tokenizer.json for a spiece.model; it keeps all whitespace."""
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString((folder / "spiece.model").read_bytes())
    pieces = [(piece.piece, piece.score, piece.type) for piece in proto.pieces]
    pieces += [(f"<extra_id_{i}>", 0.0, 3) for i in reversed(range(sentinels))]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    state = json.loads(Path(__file__).with_name("old_tokenizer.json").read_text("utf-8"))
    state["added_tokens"] = [
        {"id": i, "content": name, "special": kind in (2, 3), **flags}
        for i, (name, _, kind) in enumerate(pieces)
        if kind in (2, 3, 4)
    ]
    charsmap = base64.b64encode(proto.normalizer_spec.precompiled_charsmap).decode()
    state["normalizer"]["precompiled_charsmap"] = charsmap
    state["post_processor"]["special_tokens"]["</s>"]["ids"] = [proto.trainer_spec.eos_id]
    vocabulary = [[name, score] for name, score, _ in pieces]
    state["model"] |= {"unk_id": proto.trainer_spec.unk_id, "vocab": vocabulary}
    return state


def write_class(folder, kind):
    """Writes the folder of one of CLASSES."""
    write(folder, None, {"tokenizer_class": CLASSES[kind]})
    if kind == "llama":
        train(
            folder,
            "mt5",
            model_type="bpe",
            bos_id=3,
            vocab_size=400,
            normalization_rule_name="identity",
        )
        (folder / "spiece.model").rename(folder / "tokenizer.model")
        write(folder, None, {"tokenizer_class": CLASSES[kind]})
    elif kind == "bert":
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        tokenizer = tokenizers.BertWordPieceTokenizer()
        tokenizer.train_from_iterator(TEXTS[:4], 150, special_tokens=special, show_progress=False)
        tokenizer.save_model(str(folder))
    else:
        special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>"]
        byte_level(special).model.save(str(folder))


def byte_level(special):
    """Returns a tokenizer whose tokens are bytes, and merged bytes."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330, special_tokens=special, show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([*TEXTS[:3], TEXTS[-1]], trainer)
    return tokenizer
