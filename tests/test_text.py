"""Tokenizers as their publishers trained them, and text that streams in whole characters."""

import json
import logging
import random
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
from transformers import AutoTokenizer

import backend
from backend import UserError
from text import StreamingDetokenizer, decode, load_tokenizer, same_vocabulary

ROOT = Path(backend.__file__).parent
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
FILES = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
# pad, eos, unk, byte tokens, tokens for languages: as in t5, mt5 and MADLAD
LAYOUTS = {"t5": (0, 1, 2, False, []), "mt5": (0, 1, 2, True, []),
           "madlad": (1, 2, 0, True, ["<2en>", "<2fr>"]), "odd": (1, 2, 0, False, [])}  # fmt: skip


def train(folder, layout):
    """A sentencepiece model of the layout, in a folder such as publishers offered."""
    pad, eos, unk, fallback, languages = LAYOUTS[layout]
    folder.mkdir()
    words = " ".join(TEXTS[:3]).split()
    lines = [" ".join(random.Random(i).sample(words, 9)) for i in range(400)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(folder / "spiece"), vocab_size=600,
        hard_vocab_limit=False, model_type="unigram", byte_fallback=fallback, minloglevel=2,
        pad_id=pad, eos_id=eos, unk_id=unk, bos_id=-1, user_defined_symbols=languages,
    )  # fmt: skip
    (folder / "spiece.vocab").unlink()
    extra = 100 if layout == "t5" else 0
    settings = {"tokenizer_class": "T5Tokenizer", "extra_ids": extra, **FILES}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text('{"model_type": "t5"}')


def write_json(tokenizer, folder):
    """A folder with tokenizer.json, as publishers have offered more recently."""
    folder.mkdir()
    settings = {"tokenizer_class": "T5Tokenizer", **FILES}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))


def processor(folder):
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    for layout in LAYOUTS:
        train(root / layout, layout)
        write_json(load_tokenizer(root / layout), root / f"{layout}-json")
        write_json(AutoTokenizer.from_pretrained(root / layout), root / f"{layout}-old")
    (root / "byt5").mkdir()
    settings = {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 125, **FILES}
    (root / "byt5" / "tokenizer_config.json").write_text(json.dumps(settings))
    (root / "byt5" / "config.json").write_text('{"model_type": "t5"}')
    return root


# Kinds that can write any character. "old" are files from before tokenizers knew byte tokens.
SPELLING = ("mt5", "madlad", "mt5-json", "madlad-json", "mt5-old", "madlad-old", "byt5")
KINDS = (*SPELLING, "t5", "odd", "t5-json", "odd-json", "odd-old")


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, folders):
    return load_tokenizer(folders / request.param)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "byt5"])
def test_encodes_as_sentencepiece(folders, kind):
    tokenizer, pieces = load_tokenizer(folders / kind), processor(folders / kind.split("-")[0])
    for text in TEXTS:
        assert tokenizer.encode(text) == [*pieces.encode(text), pieces.eos_id()]
        if kind in SPELLING:
            assert decode(tokenizer, tokenizer.encode(text)) == pieces.decode(pieces.encode(text))


def test_byt5_encodes_bytes(folders):
    tokenizer = load_tokenizer(folders / "byt5")
    for text in TEXTS:
        assert tokenizer.encode(text) == [*(byte + 3 for byte in text.encode()), 1]
        assert decode(tokenizer, tokenizer.encode(text)) == text


def test_unknown_characters_do_not_end_the_text(folders):
    """transformers 5 by itself takes 2 for the unknown token, which here is the end of text."""
    for kind in ("odd", "odd-json", "odd-old"):
        tokenizer = load_tokenizer(folders / kind)
        tokens = tokenizer.encode("the 你 store")
        assert tokens.count(tokenizer.eos_token_id) == 1 and tokens.count(0) == 1


def test_sentinels_and_special_tokens_are_not_text(folders):
    tokenizer = load_tokenizer(folders / "t5")
    tokens = tokenizer.encode("the <extra_id_0> store")
    assert tokens.count(len(tokenizer) - 1) == 1
    assert decode(tokenizer, [0, *tokens]) == "the store"


def test_spaces_are_left_alone(folders):
    """Also where the folder asks for the "clean up" that transformers once did by default."""
    tokenizer = load_tokenizer(folders / "mt5")
    tokenizer.clean_up_tokenization_spaces = True
    assert decode(tokenizer, tokenizer.encode(TEXTS[1])) == TEXTS[1]


def test_no_tokenizer(folders, tmp_path):
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    assert load_tokenizer(str(tmp_path)) is None


@pytest.mark.parametrize("kind", ["mt5", "mt5-json"])
def test_damaged_files(folders, tmp_path, kind):
    folder = shutil.copytree(folders / kind, tmp_path / "m")
    path = next(p for p in folder.iterdir() if p.name in ("spiece.model", "tokenizer.json"))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(UserError) as error:
        load_tokenizer(folder)
    assert "\n" not in str(error.value)


def test_a_missing_vocabulary_is_told(folders, tmp_path):
    """transformers would make up one of its special tokens, and know no word."""
    folder = shutil.copytree(folders / "t5", tmp_path / "m")
    (folder / "spiece.model").unlink()
    with pytest.raises(UserError, match="neither tokenizer.json nor spiece.model is there"):
        load_tokenizer(folder)


@pytest.mark.parametrize("model_type", ["mt5", "umt5"])
@pytest.mark.parametrize("name", ["T5TokenizerFast", "MT5Tokenizer"])
def test_a_vocabulary_is_read_whatever_its_class_was_called(folders, tmp_path, model_type, name):
    folder = shutil.copytree(folders / "mt5", tmp_path / "m")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name, **FILES}))
    expected = [*processor(folder).encode(TEXTS[2]), processor(folder).eos_id()]
    assert load_tokenizer(folder).encode(TEXTS[2]) == expected


@pytest.mark.parametrize("kind", ["t5", "t5-json", "byt5"])
def test_torch_is_left_out(folders, kind):
    """Importing it would take longer than loading a small model and writing its first token."""
    code = "import sys, text; text.load_tokenizer(sys.argv[1]).encode('a'); print(*sys.modules)"
    command = [sys.executable, "-c", code, str(folders / kind)]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "transformers" in shown.split() and "torch" not in shown.split()


@pytest.mark.parametrize("kind", ["mt5", "mt5-json", "byt5"])
def test_loading_asks_nobody(folders, monkeypatch, kind):
    asked = []

    def refuse(*arguments):
        asked.append(arguments)
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert load_tokenizer(folders / kind).encode("the store")
    assert asked == []


@pytest.mark.parametrize("kind", ["mt5", "mt5-json", "byt5"])
def test_code_in_the_folder_never_runs(folders, tmp_path, kind):
    folder = shutil.copytree(folders / kind, tmp_path / "m")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": ["theirs.Evil", "theirs.Evil"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    try:
        load_tokenizer(folder)
    except UserError as error:
        assert "\n" not in str(error)
    assert not (tmp_path / "ran").exists()


def test_long_prompts_raise_no_warning(folders, tmp_path, caplog):
    folder = shutil.copytree(folders / "t5", tmp_path / "m")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": 9}))
    logger = logging.getLogger("transformers")  # does not propagate to the root
    logger.addHandler(caplog.handler)
    try:
        assert len(load_tokenizer(folder).encode("the store " * 50)) > 100
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.messages == []


def samples(tokenizer, seed):
    """Token lists: text, anything at all, and mostly bytes that are no UTF-8."""
    rng = random.Random(seed)
    text = " ".join(rng.choices(" ".join(TEXTS).split(), k=12))
    yield tokenizer.encode(text)
    yield tokenizer.encode("".join(map(chr, rng.choices(range(32, 0xD7FF), k=9))))
    yield rng.choices(range(len(tokenizer)), k=rng.randrange(15))
    yield rng.choices(range(261), k=rng.randrange(15))
    yield rng.choices([0, 1, 2, len(tokenizer) - 1, *tokenizer.encode("a 你 b")], k=12)


def streamed(tokenizer, tokens, rng):
    """Pieces of a stream that takes one to four tokens at a time."""
    detokenizer, pieces, start = StreamingDetokenizer(tokenizer), [], 0
    while start < len(tokens):
        end = start + rng.randint(1, 4)
        pieces.append(detokenizer.add(tokens[start:end]))
        start = end
    return [*pieces, detokenizer.finish()]


def test_pieces_make_the_text(tokenizer):
    for seed in range(60):
        for tokens in samples(tokenizer, seed):
            pieces = streamed(tokenizer, tokens, random.Random(seed))
            expected = tokenizer.decode(tokens, skip_special_tokens=True)
            assert "".join(pieces) == expected == decode(tokenizer, tokens), tokens


def test_pieces_are_whole_and_early(tokenizer):
    """No piece has half a character, and each goes out when it is certain."""
    for text in TEXTS:
        tokens = tokenizer.encode(text)[:-1]
        detokenizer, so_far = StreamingDetokenizer(tokenizer), ""
        for i, token in enumerate(tokens):
            so_far += detokenizer.add([token])
            known = decode(tokenizer, tokens[: i + 1])
            spelled = tokenizer.convert_ids_to_tokens(token).startswith("<0x")
            assert known.startswith(so_far) if spelled else so_far == known
            assert "\ufffd" not in so_far
        assert so_far + detokenizer.finish() == decode(tokenizer, tokens)


def test_cost_does_not_grow_with_the_text(tokenizer):
    class Counting:
        longest = 0

        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def decode(self, tokens, **kwargs):
            self.longest = max(self.longest, len(tokens))
            return tokenizer.decode(tokens, **kwargs)

    counting = Counting()
    tokens = tokenizer.encode(" ".join(TEXTS[:6]) * 20)
    detokenizer = StreamingDetokenizer(counting)
    if type(tokenizer).__name__ == "ByT5Tokenizer":
        detokenizer = StreamingDetokenizer(tokenizer)
        detokenizer._tokenizer = counting
    text = "".join(detokenizer.add([token]) for token in tokens) + detokenizer.finish()
    assert text == decode(tokenizer, tokens)
    assert counting.longest < 64 < len(tokens)


def test_same_vocabulary(folders):
    load = {kind: load_tokenizer(folders / kind) for kind in KINDS}
    same_vocabulary(load["t5"], load["t5"])
    same_vocabulary(load["mt5"], load["mt5-json"])
    same_vocabulary(load["t5"], load["t5-json"])  # 100 sentinels more are in no one's way
    same_vocabulary(load["t5-json"], load["t5"])
    for other in ("mt5", "odd", "byt5"):
        with pytest.raises(UserError, match="vocabularies differ: token [0-9]+ is"):
            same_vocabulary(load["t5"], load[other])
