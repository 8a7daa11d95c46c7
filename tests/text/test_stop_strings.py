"""Tests stop strings inside a token, across tokens and inside accepted blocks."""

import numpy as np
import pytest

from fake_model import EOS, FakeModel, drafter
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.drafting.source_copy import SourceCopy
from mlx_t5.errors import UserError
from mlx_t5.text.detokenizer import TextWatch
from mlx_t5.text.tokenizer import load_tokenizer
from words import Words

WORDS = ["", "", "a", "b", "ab", "bc", "c", "abc", " ", "d."]
V, TOKENIZER = len(WORDS), Words(WORDS)


def spoken(tokens, stop):
    """Returns (text, number of tokens, whether it was stopped) by the definition."""
    for count in range(1, len(tokens) + 1):
        text = TOKENIZER.decode(tokens[:count])
        places = [text.find(s) for s in stop if s in text]
        if places:
            return text[: min(places)], count, True
    return TOKENIZER.decode(tokens), len(tokens), False


def writing(tokens):
    """Returns a table that writes these tokens for any source, and then EOS."""

    def table(source, seen):
        logits = np.full(V, -9, np.float32)
        logits[tokens[len(seen) - 1] if len(seen) <= len(tokens) else EOS] = 0
        return logits

    return table


STOPS = [["abc"], ["c"], ["."], ["bcab", "d"], ["aa"], ["ca", "abca"], ["zz"], ["b", "abd"]]


@pytest.mark.parametrize("stop", STOPS, ids=repr)
@pytest.mark.parametrize("seed", range(8))
def test_the_text_ends_before_the_first_stop_string(stop, seed):
    tokens = np.random.default_rng(seed).integers(2, V, 12).tolist()
    text, count, stopped = spoken(tokens, stop)
    watch, shown = TextWatch(TOKENIZER, stop), ""
    for i, token in enumerate(tokens[:count]):
        assert watch.take([token]) == 1
        shown += watch.segments[-1]
        assert text.startswith(shown), "a part of a stop string was shown"
        assert watch.stopped == (stopped and i == count - 1)
    watch.finish()
    assert (watch.text, shown + watch.rest) == (text, text)
    at_once = TextWatch(TOKENIZER, stop)
    assert at_once.take(tokens) == count
    assert at_once.stopped == stopped


def test_only_a_possible_beginning_is_held_back():
    watch = TextWatch(TOKENIZER, ["abd"])
    watch.take([2, 3, 6, 2, 2])  # a b c a a
    assert watch.segments == ["", "", "abc", "", "a"]
    watch.finish()
    assert watch.rest == "a"


@pytest.mark.parametrize("stop", ["🙂", "а", " ", "Да 🙂 Да", "zz"])
@pytest.mark.parametrize("kind", ["gpt2", "byt5", "mt5"])
def test_text_in_byte_tokens_ends_before_a_stop_string(folders, kind, stop):
    """Each tokenizer spells "Да 🙂" in bytes, and the last byte is enough to stop."""
    tokenizer, text = load_tokenizer(folders / kind), "eggs: Да 🙂 Да 🙂 你"
    watch, tokens = TextWatch(tokenizer, [stop]), tokenizer.encode(text)
    before = tokens[: watch.take(tokens) - 1]
    watch.finish()
    assert (watch.text, watch.stopped) == (text.partition(stop)[0], stop in text)
    assert stop not in tokenizer.decode(before)
    assert "".join(watch.segments) + watch.rest == watch.text and "\ufffd" not in watch.text


@pytest.mark.parametrize(
    ("kind", "text", "stop", "expected"),
    [
        ("t5", "<extra_id_0> eggs<extra_id_1> bread", "<extra_id_1>", "eggs"),
        ("t5-json", "eggs<extra_id_1> bread", "<extra_id_1>", "eggs"),
        ("byt5", "eggs<extra_id_1> bread<extra_id_2>", "<extra_id_1>", "eggs"),
        ("t5", "eggs<extra_id_11> bread<extra_id_1>", ["<extra_id_1>"], "eggs bread"),
        ("t5", "eggs<extra_id_1> bread<extra_id_2> and", "d<extra_id_2>", "eggs brea"),
        ("t5", "eggs<extra_id_1> bread<extra_id_2> and", "<extra_id_1> b", "eggs"),
        ("t5", "eggs<extra_id_1> bread", "<extra_id_1><extra_id_1>", "eggs bread"),
        ("t5", "eggs<extra_id_1> bread", ["".join(f"<extra_id_{i}>" for i in range(99)), "d"],
         "eggs brea"),
        ("mt5", "eggs 你</s> bread", "</s>", "eggs 你"),
    ],
)  # fmt: skip
def test_a_stop_string_may_name_special_tokens(folders, kind, text, stop, expected):
    """They are never shown."""
    tokenizer = load_tokenizer(folders / kind)
    watch, tokens = TextWatch(tokenizer, [stop] if isinstance(stop, str) else stop), []
    for token in tokenizer.encode(text)[:-1]:
        tokens.append(token)
        watch.take([token])
        if watch.stopped:
            break
    watch.finish()
    shown = tokenizer.decode(tokens, skip_special_tokens=True)
    assert watch.text == expected and shown.startswith(expected)
    assert len(watch.segments) == len(tokens)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [("<extra_id_1> b", "eggs."), (".<extra_id_1>", "eggs"), ("<extra_id_1>.", "eggs. bread")],
)
def test_a_special_token_comes_after_the_text_whose_space_is_not_cleaned_yet(
    folders, stop, expected
):
    tokenizer = load_tokenizer(folders / "t5")
    tokenizer.clean_up_tokenization_spaces = True
    watch = TextWatch(tokenizer, [stop])
    watch.take(tokenizer.encode("eggs .<extra_id_1> bread")[:-1])
    watch.finish()
    assert (watch.text, watch.stopped) == (expected, expected != "eggs. bread")


# ---- in the engine -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_draft", [1, 2, 3, 7])
@pytest.mark.parametrize("stop", STOPS, ids=repr)
def test_decoding_ends_at_a_stop_string_inside_accepted_tokens(stop, num_draft):
    tokens = np.random.default_rng(num_draft).integers(2, V, 15).tolist()
    model = FakeModel(writing(tokens), V)
    text, count, stopped = spoken(tokens, stop)
    for draft in (None, drafter(model.table, model), SourceCopy()):
        decoder = SpeculativeDecoder(model, draft, TOKENIZER, num_draft)
        result = decoder.generate(tokens, max_tokens=40, stop=stop)
        assert (result.text, result.tokens) == (text, tokens[:count])
        assert result.finish_reason == "stop"
        assert result.stats.generated_tokens == len(result.origins) == count
        # The proposals may include the end token, which is not in the result.
        assert result.stats.accepted - sum(result.accepted) in (0, not stopped)
        *_, last = chunks = list(decoder.stream(tokens, max_tokens=40, stop=stop))
        assert "".join(chunk.text for chunk in chunks) == last.result.text == text
        assert sum((chunk.tokens for chunk in chunks), []) == tokens[:count]
        assert all(len(chunk.segments) == len(chunk.tokens) for chunk in chunks)


def test_statistics_leave_out_tokens_after_a_stop_string():
    tokens = [2, 3, 6, 2, 3, 6, 2, 3]
    model = FakeModel(writing(tokens), V)
    decoder = SpeculativeDecoder(model, drafter(model.table, model), TOKENIZER, 7)
    stats = decoder.generate([2], stop="ca").stats
    assert (stats.target_calls, stats.drafted, stats.accepted) == (1, 4, 4)
    assert (stats.generated_tokens, stats.tokens_per_call) == (4, 4.0)


def test_the_beginning_of_a_stop_string_is_shown_at_the_end():
    tokens = [2, 3, 6, 2, 3]
    decoder = SpeculativeDecoder(FakeModel(writing(tokens), V), None, TOKENIZER)
    for max_tokens, reason in ((5, "length"), (9, "stop")):
        result = decoder.generate([2], max_tokens=max_tokens, stop=["abx"])
        assert (result.text, result.tokens) == ("abcab", tokens)
        assert result.finish_reason == reason


def test_rows_of_a_batch_stop_independently():
    def table(source, seen):
        return writing(list(source))(source, seen)

    sources = [[2, 3, 6], [3, 4, 9, 2, 2], [6, 6, 6, 7, 2], [7]]
    decoder = SpeculativeDecoder(FakeModel(table, V), SourceCopy(), TOKENIZER, 2)
    results = decoder.generate(sources, stop=["ca", "bab"], batch_size=2)
    for source, result in zip(sources, results, strict=True):
        text, count, _ = spoken(source, ["ca", "bab"])
        assert (result.text, result.tokens) == (text, source[:count])


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(UserError, match="stop strings need a tokenizer"):
        SpeculativeDecoder(FakeModel(writing([2]), V)).generate([2], stop="a")
