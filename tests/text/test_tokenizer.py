"""Tokenizers of all kinds of folders encode like sentencepiece or transformers."""

import copy
import json
import pickle
import random
import re
import shutil

import pytest
import sentencepiece
import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mlx_t5.text.detokenizer import StreamingDetokenizer, decode
from mlx_t5.text.tokenizer import Tokenizer, load_tokenizer, save_tokenizer
from tokenizer_folders import (
    CLASSES,
    JSON,
    LAYOUTS,
    RESAVED,
    SPECIAL,
    SPIECE,
    TEXTS,
    old_json,
    settings,
    train,
    write,
)

NAMES_IN_TEXT = ["a <new> b<new>", "<two><mark> c", " <mark>a", "x <sep> y", "<s>a</s>b<pad>"]


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


def metaspace(**entries):
    """Returns a pre-tokenizer or decoder."""
    return {"type": "Metaspace", "replacement": "▁", **entries}


def processor(folder):
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model"))


def expected(pieces, text, sentinels=0):
    """Returns sentencepiece's ids of a text, with special names as single ids."""
    last = pieces.get_piece_size() + sentinels - 1
    names = {f"<extra_id_{i}>": last - i for i in range(sentinels)}
    names |= {name: pieces.piece_to_id(name) for name in SPECIAL.values()}
    parts = re.split(f"({'|'.join(names)})", text)
    ids = [[names[part]] if part in names else pieces.encode(part) for part in parts]
    return [*sum(ids, []), pieces.eos_id()]


@pytest.mark.parametrize("kind", SPIECE)
def test_a_sentencepiece_model_overrides_tokenizer_json(folders, kind):
    """The texts are full of spaces, marks and sentinels."""
    tokenizer, pieces = load_tokenizer(folders / kind), processor(folders / kind)
    texts = TEXTS + random_texts(800)
    sentinels = 100 if kind.startswith("t5") else 0
    encoded = tokenizer(texts).input_ids
    assert encoded == [expected(pieces, text, sentinels) for text in texts]
    assert [tokenizer.encode(text) for text in texts[:20]] == encoded[:20]


@pytest.mark.parametrize("options", [
    {"model_type": "bpe", "vocab_size": 120},
    {"normalization_rule_name": "identity"},
    {"normalization_rule_name": "nfkc_cf"},
    {"remove_extra_whitespaces": False},
    {"add_dummy_prefix": False},
    {"treat_whitespace_as_suffix": True},
    {"byte_fallback": True, "user_defined_symbols": ["<extra_id_0>", "\n"]},
    {"control_symbols": ["<s>", "<sep>"]},
], ids=str)  # fmt: skip
def test_any_sentencepiece_model_is_read(tmp_path, options):
    folder = tmp_path / "m"
    train(folder, "odd", **options)
    tokenizer, pieces = load_tokenizer(folder), processor(folder)
    texts = TEXTS + random_texts(200)
    assert tokenizer(texts).input_ids == [expected(pieces, text) for text in texts]


@pytest.mark.parametrize("kind", JSON + RESAVED)
def test_without_the_model_plain_text_is_encoded_the_same(folders, kind):
    layout = kind.split("-")[0]
    tokenizer, pieces = load_tokenizer(folders / kind), processor(folders / layout)
    for text in TEXTS:
        assert tokenizer.encode(text) == [*pieces.encode(text), pieces.eos_id()]
        if LAYOUTS[layout][3]:
            assert decode(tokenizer, tokenizer.encode(text)) == pieces.decode(pieces.encode(text))


def unigram(folders, **changes):
    """Returns transformers 4's tokenizer.json with changed entries; None removes an entry."""
    state = old_json(folders / "t5", 100) | changes
    return {name: entry for name, entry in state.items() if entry is not None}


def in_turn(kind, *parts):
    return {"type": "Sequence", kind: list(parts)}


SPLIT = {"type": "WhitespaceSplit"}
TWO_SPACES = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}
NEW_LINES = {"type": "Replace", "pattern": {"String": "\n"}, "content": " "}
DIGITS = {"type": "Digits", "individual_digits": True}
FORMATS = {
    "prepend always": {},
    "prepend first": {"pre_tokenizer": metaspace(prepend_scheme="first", split=False)},
    "prefix space": {"pre_tokenizer": metaspace(add_prefix_space=True),
                     "decoder": metaspace(add_prefix_space=True)},
    "str_rep": {"pre_tokenizer": metaspace(str_rep="▁", add_prefix_space=True),
                "decoder": metaspace(str_rep="▁", add_prefix_space=True)},
    "split": {"pre_tokenizer": in_turn("pretokenizers", SPLIT, metaspace(add_prefix_space=True))},
    "digits": {"pre_tokenizer": in_turn("pretokenizers", DIGITS, metaspace())},
    "no pre-tokenizer": {"pre_tokenizer": None},
    "no normalizer": {"normalizer": None},
    "NFC": {"normalizer": {"type": "NFC"}},
    "replaced": {"normalizer": in_turn("normalizers", NEW_LINES, TWO_SPACES)},
    "lower case": {"normalizer": in_turn("normalizers", {"type": "NFKC"}, {"type": "Lowercase"})},
    "no end token": {"post_processor": None},
    "another decoder": {"decoder": {"type": "BPEDecoder", "suffix": "s"}},
    "at most 4 tokens": {"truncation": {"max_length": 4, "strategy": "LongestFirst", "stride": 0,
                                        "direction": "Right"}},
}  # fmt: skip
OWN = {
    "T5Tokenizer": settings("t5"),
    "T5TokenizerFast": {"tokenizer_class": "T5TokenizerFast", **SPECIAL},
    "legacy": settings("t5", legacy=True, sp_model_kwargs={}, model_max_length=512),
    "not legacy": settings("t5", legacy=False, add_prefix_space=True),
    "sentinels listed": settings(
        "t5", additional_special_tokens=[f"<extra_id_{i}>" for i in range(100)]
    ),
    "no extra_ids": settings("t5", extra_ids=0),
    "another class": {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL},
    "MT5Tokenizer": {"tokenizer_class": "MT5Tokenizer", **SPECIAL},
    "no class": SPECIAL,
    "added_tokens_decoder": settings("t5", added_tokens_decoder={
        "1": {"content": "</s>", "special": True},
        "168": {"content": "<extra_id_0>", "lstrip": True, "rstrip": True, "special": True},
        "169": {"content": "<new>", "single_word": True},
    }),
    None: None,
}  # fmt: skip


def as_written(folder, texts, *added):
    """Compares with the tokenizers library, whose limits of length do not apply."""
    tokenizer = load_tokenizer(folder)
    reference = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    reference.add_tokens(list(added))
    reference.no_truncation()
    ids = [encoding.ids for encoding in reference.encode_batch(texts)]
    assert tokenizer(texts).input_ids == ids
    assert [decode(tokenizer, i) for i in ids] == reference.decode_batch(ids)
    assert tokenizer.get_vocab() == reference.get_vocab()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("model_type", ["t5", "umt5"])
def test_tokenizer_json_alone_is_used_as_written(folders, tmp_path, name, model_type):
    """transformers 5 rebuilds it as a T5 tokenizer instead."""
    folder = write(tmp_path / "m", unigram(folders, **FORMATS[name]), settings("t5"), model_type)
    as_written(folder, ["Two  EGGS\nare 122 e\u0301ggs", *TEXTS, *random_texts(100)])


@pytest.mark.parametrize("own", OWN)
def test_tokenizer_config_json_is_applied(folders, tmp_path, own):
    folder, added = write(tmp_path / "m", unigram(folders), OWN[own]), []
    if own == "added_tokens_decoder":
        spaces = tokenizers.AddedToken("<extra_id_0>", lstrip=True, rstrip=True, special=True)
        added = [spaces, tokenizers.AddedToken("<new>", single_word=True)]
    as_written(folder, [*TEXTS, *random_texts(100), "a <new> b<new> <new>c"], *added)


@pytest.mark.parametrize("with_model", [False, True])
def test_tokens_added_in_separate_files_are_read(folders, tmp_path, with_model):
    folder, size = tmp_path / "m", len(unigram(folders)["model"]["vocab"])
    if with_model:
        shutil.copytree(folders / "t5", folder)
    write(folder, None if with_model else unigram(folders), settings("t5"))
    (folder / "added_tokens.json").write_text(json.dumps({"<new>": size, "<mark>": size + 1}))
    special = {**SPECIAL, "additional_special_tokens": ["<mark>"]}
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("<new><mark>") == [size, size + 1, 1]
    if with_model:
        texts = [*TEXTS[:3], "a <new> b<mark> c", "a<extra_id_0> b"]
        reference = AutoTokenizer.from_pretrained(folder)
        assert tokenizer(texts).input_ids == reference(texts).input_ids
        assert tokenizer.get_vocab() == reference.get_vocab()


def test_a_bpe_vocabulary_is_read(tmp_path):
    """transformers' T5 tokenizer cannot read a published model with a BPE vocabulary."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=["<pad>", "</s>", "<unk>"], vocab_size=90, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS[:3], trainer)
    state = {**json.loads(tokenizer.to_str()), "added_tokens": [],
             "pre_tokenizer": metaspace(add_prefix_space=True)}  # fmt: skip
    sentinels = [f"<extra_id_{i}>" for i in range(48)]
    own = {**SPECIAL, "tokenizer_class": "T5Tokenizer", "extra_ids": 48,
           "additional_special_tokens": sentinels}  # fmt: skip
    folder = write(tmp_path / "m", state, own)
    with pytest.raises(TypeError):
        AutoTokenizer.from_pretrained(folder)
    plain = PreTrainedTokenizerFast.from_pretrained(folder)
    texts = TEXTS + random_texts(100)
    assert load_tokenizer(folder)(texts).input_ids == plain(texts).input_ids


@pytest.mark.parametrize("kind", CLASSES)
def test_what_transformers_can_load_is_loaded_and_saved(folders, tmp_path, kind):
    tokenizer = load_tokenizer(folders / kind)
    reference = AutoTokenizer.from_pretrained(folders / kind)
    write(tmp_path, None)
    save_tokenizer(tokenizer, folders / kind, tmp_path)
    texts = [*TEXTS, *random_texts(100)]
    for saved in (tokenizer, load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)):
        assert saved(texts).input_ids == reference(texts).input_ids
        assert reference.special_tokens_map.items() <= saved.special_tokens_map.items()
        assert decode(saved, saved.encode("eggs")) == decode(reference, reference.encode("eggs"))


def test_tokenizer_model_is_read_as_spiece_model(folders, tmp_path):
    folder = shutil.copytree(folders / "mt5", tmp_path / "m")
    (folder / "spiece.model").rename(folder / "tokenizer.model")
    tokenizer, pieces = load_tokenizer(folder), processor(folders / "mt5")
    assert tokenizer(TEXTS).input_ids == [expected(pieces, text) for text in TEXTS]
    save_tokenizer(tokenizer, folder, tmp_path)
    assert not (tmp_path / "tokenizer.json").exists(), "it would be inexact, and is not needed"


@pytest.mark.parametrize("kind", ["t5", "madlad"])
def test_tokenizer_json_with_another_vocabulary_overrides_the_model(folders, tmp_path, kind):
    """Such folders are left by `train_new_from_iterator` and `save_pretrained`."""
    folder = shutil.copytree(folders / kind, tmp_path / "m")
    old = AutoTokenizer.from_pretrained(folder)
    old.train_new_from_iterator([TEXTS[0], TEXTS[2]], 60).save_pretrained(folder)
    assert (folder / "spiece.model").exists()
    texts = [TEXTS[0], TEXTS[2]]
    as_written(folder, texts)
    assert (
        load_tokenizer(folder)(texts).input_ids != load_tokenizer(folders / kind)(texts).input_ids
    )


@pytest.mark.parametrize("model_type", ["t5", "umt5"])
def test_an_unknown_character_needs_no_configuration(folders, tmp_path, model_type):
    folder = write(tmp_path / "m", unigram(folders), None, model_type)
    assert 2 in load_tokenizer(folder).encode("the 你 store")


def test_unknown_characters_do_not_end_the_text(folders):
    """transformers 5 assumes id 2 for the unknown token, which is the end token here."""
    for kind in ("odd", "odd-both", "odd-json", "odd-resaved"):
        tokenizer = load_tokenizer(folders / kind)
        tokens = tokenizer.encode("the 你 store")
        assert tokens.count(tokenizer.eos_token_id) == 1 and tokens.count(0) == 1


def test_copies_and_saved_tokenizers_read_the_same(folders, tmp_path):
    tokenizer, texts = load_tokenizer(folders / "madlad-both"), random_texts(100)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path)
    for again in (load_tokenizer(tmp_path), copy.deepcopy(tokenizer)):
        assert again.get_vocab() == tokenizer.get_vocab() and "<new>" in again.get_vocab()
        encoded = again([*texts, "a <new> b"]).input_ids
        assert encoded == tokenizer([*texts, "a <new> b"]).input_ids
        assert [decode(again, ids) for ids in encoded] == [decode(tokenizer, i) for i in encoded]


def test_byt5_encodes_bytes(folders, tmp_path):
    config = {"model_type": "t5", "tokenizer_class": "ByT5Tokenizer"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for tokenizer in (load_tokenizer(folders / "byt5"), load_tokenizer(tmp_path)):
        for text in TEXTS:
            assert tokenizer.encode(text) == [*(byte + 3 for byte in text.encode()), 1]
            assert decode(tokenizer, tokenizer.encode(text)) == text


def test_sentinels_and_special_tokens_are_not_text(folders):
    tokenizer = load_tokenizer(folders / "t5")
    tokens = tokenizer.encode("the <extra_id_0> store")
    assert tokens.count(len(tokenizer) - 1) == 1
    assert decode(tokenizer, [0, *tokens]) == "the store"


@pytest.mark.parametrize("model_type", ["mt5", "umt5"])
@pytest.mark.parametrize("name", ["T5TokenizerFast", "MT5Tokenizer"])
def test_a_vocabulary_is_read_whatever_its_class_was_called(folders, tmp_path, model_type, name):
    folder = shutil.copytree(folders / "mt5", tmp_path / "m")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name, **SPECIAL}))
    expected = [*processor(folder).encode(TEXTS[2]), processor(folder).eos_id()]
    assert load_tokenizer(folder).encode(TEXTS[2]) == expected


def answers(tokenizer, texts):
    """What decoding asks of a tokenizer."""
    ids = [tokenizer.encode(text) for text in texts]
    names = ("eos_token", "pad_token", "unk_token")
    vocabulary = tokenizer.get_vocab()
    return {
        "ids": ids,
        "texts": [decode(tokenizer, row) for row in ids],
        "with special": [tokenizer.decode(row) for row in ids],
        "streamed": ["".join(map(StreamingDetokenizer(tokenizer).add, row)) for row in ids[:20]],
        "vocabulary": vocabulary,
        "pieces": [tokenizer.convert_ids_to_tokens(i) for i in sorted(vocabulary.values())],
        "named": [getattr(tokenizer, n) for n in (*names, *(f"{n}_id" for n in names))],
        "special": (tokenizer.all_special_tokens, tokenizer.all_special_ids),
        "size": len(tokenizer),
    }


def agrees_with_transformers(folder, texts):
    tokenizer = load_tokenizer(folder)
    ours = answers(tokenizer, texts)
    assert isinstance(tokenizer, Tokenizer) and tokenizer._made is None
    assert ours == answers(tokenizer.transformers_tokenizer, texts)
    assert ours == answers(tokenizer, texts), "transformers' tokenizer answers by now"


@pytest.mark.parametrize("kind", [*SPIECE, *JSON, *RESAVED])
def test_answers_are_those_of_the_transformers_tokenizer(folders, kind):
    agrees_with_transformers(folders / kind, [*TEXTS, *random_texts(200), *NAMES_IN_TEXT])


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("with_model", [False, True])
def test_added_tokens_are_those_of_the_transformers_tokenizer(folders, tmp_path, own, with_model):
    if with_model:
        shutil.copytree(folders / "t5", tmp_path / "m")
    folder = write(tmp_path / "m", None if with_model else unigram(folders), OWN[own])
    size = len(unigram(folders)["model"]["vocab"])
    added = {"<new>": size, "<mark>": size + 1}
    (folder / "added_tokens.json").write_text(json.dumps(added))
    mark = {"content": "<mark>", "lstrip": True, "rstrip": False, "normalized": False}
    special = {**SPECIAL, "sep_token": mark, "additional_special_tokens": ["<two>", "<mark>"]}
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    agrees_with_transformers(folder, [*TEXTS, *random_texts(100), *NAMES_IN_TEXT])


def test_transformers_reads_what_only_it_understands(folders, tmp_path):
    for own in ({"image_token": "<image>"}, {"extra_special_tokens": {"a_token": "<a>"}}):
        folder = write(tmp_path / "m", unigram(folders), settings("t5", **own))
        assert isinstance(load_tokenizer(folder), PreTrainedTokenizerFast)


@pytest.mark.parametrize("kind", ["madlad", "madlad-json"])
def test_a_changed_tokenizer_is_changed_in_all_answers(folders, kind):
    tokenizer, copied = load_tokenizer(folders / kind), None
    before = tokenizer.encode("a <new> b")
    copied = copy.deepcopy(tokenizer)
    tokenizer.add_tokens(["<new>"])
    assert len(tokenizer) - 1 in tokenizer.encode("a <new> b") and "<new>" in tokenizer.get_vocab()
    assert copied.encode("a <new> b") == before and "<new>" not in copied.get_vocab()
    copied.pad_token = "▁the"
    assert copied.pad_token_id == copied.get_vocab()["▁the"] != tokenizer.pad_token_id
    for again in (pickle.loads(pickle.dumps(tokenizer)), copy.deepcopy(tokenizer)):
        assert answers(again, TEXTS) == answers(tokenizer, TEXTS)
    assert tokenizer(TEXTS[:2], return_tensors="np", padding=True)["input_ids"].shape[0] == 2
