"""Tests that text streams in whole characters, and that vocabularies are compared."""

import json
import random
import shutil

import pytest
from tokenizers import decoders
from transformers import PreTrainedTokenizerBase

from mlx_t5.errors import UserError
from mlx_t5.text.detokenizer import StreamingDetokenizer, decode
from mlx_t5.text.tokenizer import load_tokenizer, same_vocabulary
from tokenizer_folders import CLASSES, JSON, RESAVED, SPIECE, TEXTS
from words import Words

KINDS = (*SPIECE, *JSON, *RESAVED, *CLASSES, "byt5")


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, folders):
    return load_tokenizer(folders / request.param)


@pytest.mark.parametrize("kind", ["t5", "mt5-json", "byt5", "bert", "gpt2", "llama"])
def test_spaces_are_cleaned_away_if_the_folder_says_so(folders, tmp_path, kind):
    """Texts are those of transformers, which leaves BPE's alone; so are streamed ones."""
    folder = shutil.copytree(folders / kind, tmp_path / kind)
    own = json.loads((folder / "tokenizer_config.json").read_text())
    own["clean_up_tokenization_spaces"] = True
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    tokenizer, reference = load_tokenizer(folder), load_tokenizer(folder)
    reference = getattr(reference, "transformers_tokenizer", reference)
    for text in (TEXTS[1], "le garçon ? oui !", "it ' n't , 's", *TEXTS):
        tokens = tokenizer.encode(text)
        expected = reference.decode(tokens, skip_special_tokens=True)
        assert decode(tokenizer, tokens) == expected
        detokenizer = StreamingDetokenizer(tokenizer)
        assert "".join(map(detokenizer.add, tokens)) + detokenizer.finish() == expected
    assert tokenizer.decode(tokens) == reference.decode(tokens)
    plain = load_tokenizer(folders / kind)
    changed = decode(tokenizer, tokenizer.encode(TEXTS[1])) != decode(plain, plain.encode(TEXTS[1]))
    assert changed == (kind not in ("gpt2", "llama"))


def test_a_stream_is_cleaned_as_the_text_so_far_would_be():
    tokenizer = Words([*" .?!,'nmtsvrea", " '", "n't", " s", "aa "])
    tokenizer.clean_up_tokenization_spaces, rng = True, random.Random(0)
    for _ in range(1000):
        detokenizer, raw, shown = StreamingDetokenizer(tokenizer), "", ""
        for token in rng.choices(range(len(tokenizer.words)), k=14):
            raw += tokenizer.words[token]
            shown += detokenizer.add(token)
            expected = PreTrainedTokenizerBase.clean_up_tokenization(None, raw)
            assert shown + detokenizer.peek() == expected, raw
            assert shown == raw or " " in raw, "held back for no reason"
        assert shown + detokenizer.finish() == expected


def samples(tokenizer, seed):
    """Yields token lists: text, random tokens, and bytes that are mostly not UTF-8."""
    rng = random.Random(seed)
    text = " ".join(rng.choices(" ".join(TEXTS).split(), k=12))
    yield tokenizer.encode(text)
    yield tokenizer.encode("".join(map(chr, rng.choices(range(32, 0xD7FF), k=9))))
    yield rng.choices(range(len(tokenizer)), k=rng.randrange(15))
    yield rng.choices(range(261), k=rng.randrange(15))
    yield rng.choices([0, 1, 2, len(tokenizer) - 1, *tokenizer.encode("a 你 b")], k=12)


@pytest.mark.slow
def test_segments_make_the_text(tokenizer):
    for seed in range(30):
        for tokens in samples(tokenizer, seed):
            detokenizer = StreamingDetokenizer(tokenizer)
            text = "".join(map(detokenizer.add, tokens)) + detokenizer.finish()
            expected = tokenizer.decode(tokens, skip_special_tokens=True)
            assert text == expected == decode(tokenizer, tokens), tokens


def test_segments_are_whole_and_early(tokenizer):
    """No piece has half a character, and each piece is sent as soon as it is certain."""
    for text in TEXTS:
        tokens = tokenizer.encode(text)[:-1]
        detokenizer, so_far = StreamingDetokenizer(tokenizer), ""
        for i, token in enumerate(tokens):
            so_far += detokenizer.add(token)
            known = decode(tokenizer, tokens[: i + 1]).rstrip("\ufffd")
            spelled = tokenizer.convert_ids_to_tokens(token).startswith("<0x")
            assert known.startswith(so_far) if spelled else so_far == known
            assert "\ufffd" not in so_far
        assert so_far + detokenizer.finish() == decode(tokenizer, tokens)


DECODERS = [None, decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])]


@pytest.mark.parametrize("decoder", DECODERS, ids=["none", "sequence"])
def test_any_decoder_streams_whole_characters(folders, decoder):
    tokenizer = load_tokenizer(folders / "gpt2")
    tokenizer.backend_tokenizer.decoder = decoder
    for seed, text in enumerate(TEXTS):
        for tokens in (tokenizer.encode(text), *samples(tokenizer, seed)):
            detokenizer = StreamingDetokenizer(tokenizer)
            segments = [*map(detokenizer.add, tokens)]
            assert "".join(segments) + detokenizer.finish() == decode(tokenizer, tokens)
            assert not any(segment.endswith("\ufffd") for segment in segments)


@pytest.mark.slow
def test_cost_does_not_grow_with_the_text(tokenizer, monkeypatch):
    lengths, whole = [0], tokenizer.decode
    tokens = tokenizer.encode(" ".join(TEXTS[:6]) * 20)
    counted = lambda tokens, **how: lengths.append(len(tokens)) or whole(tokens, **how)  # noqa: E731
    monkeypatch.setattr(tokenizer, "decode", counted)
    detokenizer = StreamingDetokenizer(tokenizer)
    text = "".join(map(detokenizer.add, tokens)) + detokenizer.finish()
    assert max(lengths) < 64 < len(tokens) and text == decode(tokenizer, tokens)


def test_same_vocabulary(folders):
    load = {kind: load_tokenizer(folders / kind) for kind in KINDS}
    same_vocabulary(load["t5"], load["t5"])
    same_vocabulary(load["mt5"], load["mt5-json"])
    same_vocabulary(load["t5"], load["t5-json"])  # 100 further sentinels do no harm
    same_vocabulary(load["t5-json"], load["t5"])
    for other in ("mt5", "odd", "byt5"):
        with pytest.raises(UserError, match="vocabularies differ: token [0-9]+ is"):
            same_vocabulary(load["t5"], load[other])
