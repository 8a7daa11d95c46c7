"""Tests answers that are built from chunks: the tokens with log-probabilities form the text."""

import itertools

import numpy as np
import pytest
import tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from fake_model import FakeModel, drafter, good, random_table
from fake_serving import PATIENCE, Client
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.engine.rows import Chunk
from mlx_t5.serving.builders import CompletionBuilder, DecodedToken, TokenDecoder
from mlx_t5.serving.metrics import Metrics
from mlx_t5.serving.requests import CompletionRequest
from mlx_t5.serving.responses import CompletionChoice
from mlx_t5.serving.worker import Worker
from mlx_t5.text.detokenizer import decode
from tokenizer_folders import byte_level

PIECES = ["▁", "▁She", "▁has", "s", "▁two", "▁cat", ".", "é", "▁naïve"]
SPECIAL = ["<pad>", "</s>", "<unk>", "<extra_id_0>"]
NAMES = ["<0xC3>", "<0xA9>", "<0xE4>", "<0x41>", *PIECES, *SPECIAL[1:]]  # in pieces_and_bytes
LETTERS = "abé é "  # in ByT5's tokenizer


def pieces_and_bytes():
    """Returns a unigram tokenizer that spells unknown text in bytes, as mT5's does."""
    names = [*SPECIAL, *(f"<0x{i:02X}>" for i in range(256)), *PIECES]
    model = tokenizers.models.Unigram([(name, 0.0) for name in names], 2, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    parts = [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Metaspace()]
    tokenizer.decoder = tokenizers.decoders.Sequence(parts)
    named = dict(zip(("pad_token", "eos_token", "unk_token"), SPECIAL, strict=False))
    more = {"additional_special_tokens": SPECIAL[3:]}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named, **more)


def byte_level_bpe():
    """Returns a tokenizer whose tokens are bytes or merged bytes, as CodeT5's does."""
    named = dict(zip(("pad_token", "eos_token", "unk_token"), SPECIAL, strict=False))
    return PreTrainedTokenizerFast(tokenizer_object=byte_level(SPECIAL), **named)


def favoring(tokens, vocab_size):
    """Returns the table of a model that writes the given tokens only."""
    table = random_table(vocab_size, spread=2.0)

    def logits(source, seen):
        values = np.full(vocab_size, -1e4, np.float32)
        values[tokens] = table(source, seen)[tokens]
        return values

    return logits


def models():
    """Yields a tokenizer of each kind and the ids of its likely tokens."""
    tokenizer = pieces_and_bytes()
    yield tokenizer, tokenizer.convert_tokens_to_ids(NAMES)
    tokenizer = ByT5Tokenizer()
    yield tokenizer, sorted({*tokenizer.encode(LETTERS), tokenizer.convert_tokens_to_ids("<unk>")})
    tokenizer = byte_level_bpe()
    yield tokenizer, sorted({*tokenizer.encode(f"{LETTERS} Да 🙂 😀"), 1})


@pytest.fixture(scope="module", params=range(3), ids=["pieces and bytes", "bytes", "byte-level"])
def served(request):
    """Returns a tokenizer, and `ask(stream, seed, **settings)`: the chunks of one job."""
    tokenizer, tokens = list(models())[request.param]
    model = FakeModel(favoring(tokens, len(tokenizer)), len(tokenizer))
    draft = drafter(good(model.table), model)
    decoder = SpeculativeDecoder(model, draft, tokenizer, num_draft=3)
    worker = Worker(lambda: decoder, 1, 1, Metrics())
    worker.start()

    def ask(stream, seed, **settings):
        client = Client(worker, decoder)
        client.submit([[5 + seed]], seed, temp=1.0, stream=stream, logprobs=3, **settings)
        while True:
            chunk = client.next()
            assert isinstance(chunk, Chunk), chunk
            yield chunk
            if chunk.result:
                return

    yield tokenizer, ask
    assert worker.stop(PATIENCE)


SETTINGS = [
    {"max_tokens": 30},
    {"max_tokens": 30, "stop": (" cat.", "é", "bé", " 🙂")},
    {"max_tokens": 30, "stop": ("She has two s", "é é a b", "s.s.s")},
    {"max_tokens": 3},
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("stream", [False, True])
def test_the_tokens_joined_are_the_text(served, stream, settings):
    tokenizer, ask = served
    for seed in range(6):
        body = CompletionRequest(prompt="x", stream=stream, logprobs=3)
        builder = CompletionBuilder(body, "a model", TokenDecoder(tokenizer).decode)
        texts, offsets, tokens = [], [], []
        for event in ask(stream, seed, **settings):
            choice = CompletionChoice(**builder.choice(event))
            logprobs = choice.logprobs
            assert "".join(logprobs.tokens) == choice.text, "in each chunk already"
            lengths = map(len, (logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs))
            assert set(lengths) == {len(logprobs.text_offset)}
            for token, value, top in zip(
                logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
            ):
                assert top.get(token, value) == value and len(top) <= 3
            texts.append(choice.text)
            offsets += logprobs.text_offset
            tokens += logprobs.tokens
        assert "".join(texts) == event.result.text
        assert offsets == list(itertools.accumulate(map(len, tokens), initial=0))[: len(tokens)]


def test_single_tokens_are_decoded_to_text_and_bytes():
    tokenizer = pieces_and_bytes()
    decode_token = TokenDecoder(tokenizer).decode
    for name, text, encoded in [
        ("▁cat", " cat", b" cat"),
        ("é", "é", "é".encode()),
        ("<0x41>", "A", b"A"),
        ("<0x0A>", "\n", b"\n"),
        ("<0xC3>", r"\xc3", b"\xc3"),
    ]:
        token = tokenizer.convert_tokens_to_ids(name)
        assert decode_token(token) == DecodedToken(text, list(encoded))
    decode_byte, tokens = TokenDecoder(byte_level_bpe()).decode, byte_level_bpe().encode("Ж")
    assert [decode_byte(token).text for token in tokens] == [r"\xd0", r"\x96"]
    for name in ("</s>", "<unk>", "<extra_id_0>"):
        assert decode_token(tokenizer.convert_tokens_to_ids(name)) == DecodedToken(name, None)
    unknown = decode_token(len(tokenizer) + 5)
    assert unknown == DecodedToken("", None), "models have more ids than tokenizers"


@pytest.mark.parametrize("make", [pieces_and_bytes, ByT5Tokenizer, byte_level_bpe])
@pytest.mark.parametrize("text", ["She has two cats.", " naïve é", "你好 😀 s", "Да 🙂"])
def test_the_bytes_of_all_tokens_are_the_text(make, text):
    tokenizer = make()
    decoder, tokens = TokenDecoder(tokenizer), tokenizer.encode(text)
    joined = b"".join(bytes(decoder.decode(token).bytes or []) for token in tokens)
    assert joined.decode().strip() == decode(tokenizer, tokens).strip() == text.strip()
