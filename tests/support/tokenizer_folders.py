"""Makes small folders with tokenizers in the layouts that publishers used over the years."""

import base64
import json
import random
import shutil

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from transformers import AutoTokenizer

TEXTS = [
    "Let's go to the store and buy some groceries including eggs, avocadoes, and bread.",
    "it 's ( fine ) , is n't it ?",
    "Le garçon naïve a mangé un œuf à la maison.",
    "你好，世界! こんにちは 안녕하세요",
    "an emoji 😀, a family 👨‍👩‍👧‍👦 and a flag 🇫🇷",
    "e\u0301 is é here",
    "",
    "😀",
]
SPECIAL = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
# pad, eos, unk, whether it has byte tokens, and language tokens: t5, mt5 and MADLAD
LAYOUTS = {"t5": (0, 1, 2, False, []), "mt5": (0, 1, 2, True, []),
           "madlad": (1, 2, 0, True, ["<2en>", "<2fr>"]), "odd": (1, 2, 0, False, [])}  # fmt: skip
SENTINELS = {"t5": 100}
# The files of each layout. "both": tokenizer.json of transformers 4 beside spiece.model. "resaved":
# saved again by transformers 5, which loses byte tokens and the unknown token.
SPIECE = [f"{layout}{kind}" for layout in LAYOUTS for kind in ("", "-both")]
JSON = [f"{layout}-json" for layout in LAYOUTS]
RESAVED = [f"{layout}-resaved" for layout in ("mt5", "madlad", "odd")]


def make(root):
    """Makes all folders of SPIECE, JSON and RESAVED, and "byt5", under `root`."""
    for layout in LAYOUTS:
        folder = root / layout
        train(folder, layout)
        both = shutil.copytree(folder, root / f"{layout}-both")
        write(both, old_json(folder, SENTINELS.get(layout, 0)))
        state = old_json(folder, SENTINELS.get(layout, 0))
        write(root / f"{layout}-json", state, settings(layout))
        if f"{layout}-resaved" in RESAVED:
            resaved = AutoTokenizer.from_pretrained(folder).backend_tokenizer.to_str()
            write(root / f"{layout}-resaved", json.loads(resaved), settings(layout))
    named = {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 125, **SPECIAL}
    write(root / "byt5", None, named)


def settings(layout, **more):
    extra = SENTINELS.get(layout, 0)
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
    vocabulary = [[piece.piece, piece.score] for piece in proto.pieces]
    vocabulary += [[f"<extra_id_{i}>", 0.0] for i in reversed(range(sentinels))]
    kinds = [piece.type for piece in proto.pieces] + [3] * sentinels
    special = {i: kind in (2, 3) for i, kind in enumerate(kinds) if kind in (2, 3, 4)}
    end = [{"SpecialToken": {"id": "</s>", "type_id": 0}}]
    first, second = ([{"Sequence": {"id": name, "type_id": 0}}] for name in "AB")
    charsmap = base64.b64encode(proto.normalizer_spec.precompiled_charsmap).decode()
    added = [
        {"id": i, "content": vocabulary[i][0], "special": is_special}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for i, is_special in special.items()
    ]
    ending = {"id": "</s>", "ids": [proto.trainer_spec.eos_id], "tokens": ["</s>"]}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap},
        "pre_tokenizer": metaspace(),
        "post_processor": {
            "type": "TemplateProcessing",
            "single": first + end,
            "pair": first + end + second + end,
            "special_tokens": {"</s>": ending},
        },
        "decoder": metaspace(),
        "model": {"type": "Unigram", "unk_id": proto.trainer_spec.unk_id, "vocab": vocabulary},
    }


def metaspace(**entries):
    """Returns a pre-tokenizer or decoder, by default with transformers 4's last entries."""
    entries = entries or {"prepend_scheme": "always", "split": True}
    return {"type": "Metaspace", "replacement": "▁", **entries}


def random_texts(count, seed=0):
    """Returns texts full of characters about which tokenizers disagree."""
    rng = random.Random(seed)
    words = [
        "the", "store", "  ", " ", "\t", "\n", "\r\n", "\u00a0", "\u3000", "\u2028", "▁", "a", "b",
        "eggs,", "garçon", "œuf", "你好", "😀", "👨\u200d👩", "ﬁ", "①", "Å", "é", "e\u0301",
        "\u0323", "ᄒ\u1161\u11ab", "\u200b", "<0x41>", "<2en>", "<", ">", "<extra_id_0>",
        "<extra_id_7> ", " </s>", "<pad>", "<unk>", "\0", "\x07",
    ]  # fmt: skip
    return ["".join(rng.choices(words, k=rng.randrange(10))) for _ in range(count)]
