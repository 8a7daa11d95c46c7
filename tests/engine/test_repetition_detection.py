"""Texts end where they run into a loop, whatever was proposed; looped pieces are decoded again."""

import math
from dataclasses import asdict

import numpy as np
import pytest

import looping
from fake_model import EOS, FakeModel, contrary, drafter, good
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.errors import UserError
from words import Words

pytestmark = pytest.mark.usefixtures("unpadded")  # fake models count positions

WORDS = ["", "", "a", "b", "ab", "bc", "c", "abc", " ", "d."]
V, TOKENIZER = len(WORDS), Words(WORDS)
DETECTION = {"max_pattern_size": 3, "min_count": 3}
DRAFTS = {"none": None, "good": good, "bad": contrary}


def text_of(source):
    """The tokens that the model writes: some at random, then a pattern over and over or an end."""
    rng = np.random.default_rng(source)
    beginning, pattern = (rng.integers(2, V, rng.integers(*size)) for size in ((0, 9), (1, 5)))
    return [*beginning.tolist(), *pattern.tolist() * int(rng.integers(1, 9)), EOS]


def table(source, seen):
    text, logits = text_of(source), np.full(V, -9, np.float32)
    logits[text[len(seen) - 1] if len(seen) <= len(text) else EOS] = 0
    return logits


def expected(source, stop, most):
    """The tokens, text and reason of a source, by the definitions."""
    written = text_of(source)[:-1]
    for count in range(1, len(written) + 1):
        tokens = written[:count]
        text = TOKENIZER.decode(tokens)
        if any(one in text for one in stop):
            return tokens, text[: min(text.find(s) for s in stop if s in text)], "stop"
        for size in range(1, 4):
            if count >= 3 * size and tokens[-3 * size :] == tokens[-size:] * 3:
                return tokens[: -2 * size], TOKENIZER.decode(tokens[: -2 * size]), "repetition"
        if count == most:
            return tokens, text, "length"
    return written, TOKENIZER.decode(written), "stop"


@pytest.mark.parametrize("stop", [(), ("bca", "abab", "d.d")])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
def test_proposals_batches_and_streams_do_not_change_where_a_text_ends(draft, batch_size, stop):
    """Tests laws 5, 6 and 7 for a loop, as for an end token."""
    model = FakeModel(table, V)
    decoder = SpeculativeDecoder(model, draft and drafter(draft(table), model), TOKENIZER)
    options = {"stop": stop, "max_tokens": 12, "repetition_detection": DETECTION, "num_draft": 4}
    sources = [[n % 7 + 2, n // 7 + 2] for n in range(20)]
    results, reasons = decoder.generate(sources, batch_size=batch_size, **options), set()
    for source, result in zip(sources, results, strict=True):
        assert (result.tokens, result.text, result.finish_reason) == expected(source, stop, 12)
        reasons.add(result.finish_reason)
        check_counts(result)
        chunks = list(decoder.stream(source, **options))
        assert [token for chunk in chunks for token in chunk.tokens] == result.tokens
        assert "".join(chunk.text for chunk in chunks) == result.text
        last = chunks[-1].result
        assert (last.origins, last.finish_reason) == (result.origins, result.finish_reason)
        for name in ("generated_tokens", "target_calls", "drafted", "accepted", "speculation"):
            assert getattr(last.stats, name) == getattr(result.stats, name)
        for chunk in chunks:
            pieces = [piece for piece in chunk.segments if piece]
            assert len(chunk.segments) == len(chunk.tokens) and chunk.text.startswith(
                "".join(pieces)
            )
    assert reasons == {"stop", "repetition", "length"}


def check_counts(result):
    """Asserts that the statistics count the tokens of the result, and the end token."""
    stats, speculation = result.stats, result.stats.speculation
    assert stats.generated_tokens == len(result.tokens) == len(result.origins)
    assert stats.accepted - sum(result.accepted) in (0, 1)
    assert sum(speculation.accepted_by_position) == stats.accepted <= stats.drafted
    assert sum(speculation.drafted_by_position) == stats.drafted
    assert sum(speculation.steps_by_length) == stats.target_calls


def writing(*tokens):
    def table(source, seen):
        logits = np.full(V, -9, np.float32)
        # A GPU may have begun a pass behind the end.
        logits[[*tokens, EOS][min(len(seen) - 1, len(tokens))]] = 0
        return logits

    return SpeculativeDecoder(FakeModel(table, V), None, TOKENIZER)


def test_a_stream_sends_what_it_held_back_as_soon_as_the_repetition_breaks():
    stream = writing(2, 3, 2, 3, 2, 6, 6).stream([5], repetition_detection=DETECTION)
    chunks = [(chunk.tokens, chunk.text, chunk.stats.generated_tokens) for chunk in stream]
    assert [c[:2] for c in chunks[:6]] == [
        ([2], "a"),
        ([3], "b"),
        *[([], "")] * 3,
        ([2, 3, 2, 6], "abac"),
    ]
    assert [c[:2] for c in chunks[6:]] == [([], ""), ([6], "c")]


def test_an_equal_prompt_ends_in_the_same_loop():
    first, again = writing(2, 3, 4, 3, 4, 3, 4, 3).generate(
        [[5], [5]], repetition_detection=DETECTION
    )
    assert first.tokens == again.tokens == [2, 3, 4] and again.stats.reused == 1
    assert first.finish_reason == again.finish_reason == "repetition"
    assert (first.text, first.origins) == (again.text, again.origins)


def test_a_loop_never_makes_a_text_shorter_than_min_tokens():
    result = writing(*[2] * 30).generate([5], min_tokens=8, repetition_detection=DETECTION)
    assert (result.tokens, result.finish_reason) == ([2] * 8, "repetition")


@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
def test_sampled_texts_with_a_seed_end_in_the_same_place(draft):
    model = FakeModel(lambda source, seen: table(source, seen) / 3, V)
    options = {"temp": 1.0, "seed": 4, "max_tokens": 30, "num_samples": 4}
    options["repetition_detection"] = {"max_pattern_size": 4, "min_count": 2}
    decoder = SpeculativeDecoder(model, draft and drafter(draft(table), model), TOKENIZER)
    plain = SpeculativeDecoder(model, None, TOKENIZER).generate([[5], [7, 2]], **options)
    results = decoder.generate([[5], [7, 2]], batch_size=3, **options)
    assert [r.tokens for r in results] == [r.tokens for r in plain]
    assert "repetition" in {r.finish_reason for r in results}
    for result in results:
        check_counts(result)


# ---- pieces of documents -------------------------------------------------------------------------

CATS, RAIN = "We have two cats.", "The old window was white, and the rain was late, and we ate."
DOCUMENT = f"{CATS}  {RAIN}\n\n{CATS}"


def translator(draft=None):
    model = looping.model()
    draft = draft and drafter(draft(looping.looping), model)
    return SpeculativeDecoder(model, draft, looping.TOKENIZER)


def translated(text, decoder=None, **options):
    options = {"target_language": "fr", "source_language": "en", "max_tokens": 60, **options}
    return (decoder or translator()).generate(text, **options)


@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
def test_a_piece_that_loops_is_cut_at_clause_marks_and_decoded_again(draft, batch_size):
    decoder = translator(draft)
    result = translated(DOCUMENT, decoder, batch_size=batch_size)
    assert result.text == DOCUMENT, "the model copies what does not loop"
    assert [piece.looped for piece in result.pieces] == [None, True, None]
    assert (result.finish_reason, result.stats.looped, result.stats.pieces) == ("stop", 1, 3)
    check_counts_of_document(result)
    languages = {"target_language": "fr", "source_language": "en"}
    chunks = list(decoder.stream(DOCUMENT, max_tokens=60, **languages))
    assert "".join(chunk.text for chunk in chunks) == DOCUMENT and len(chunks) == 3
    assert asdict(chunks[-1].result)["pieces"] == asdict(result)["pieces"]
    off = translated(DOCUMENT, decoder, repetition_detection=None)
    assert off.finish_reason == "length" and off.pieces[1].text.count("the rain") > 20
    assert off.stats.generated_tokens > 2 * result.stats.generated_tokens


def check_counts_of_document(result):
    assert result.stats.generated_tokens == len(result.tokens) == len(result.origins)
    assert sum(result.accepted) <= result.stats.accepted <= sum(result.accepted) + 9


def test_a_part_that_loops_is_cut_between_words_and_once_more_at_most():
    text = "We ate, and then the old window and the rain was late."
    result = translated(text)
    assert (result.text, result.finish_reason, result.stats.looped) == (text, "stop", 1)
    text = "We ate, and then the old window and the snow was late."
    result = translated(f"{text} {CATS}")
    assert result.text == f"We ate, and then the old window and the snow {CATS}"
    assert (result.finish_reason, result.stats.looped) == ("repetition", 1)
    assert [piece.finish_reason for piece in result.pieces] == ["repetition", "stop"]
    (piece,) = translated("snow").pieces
    assert piece.text == "snow" and piece.looped, "a single word cannot be cut"


def test_what_the_source_repeats_is_no_loop():
    laughs = "Ha ha ha ha ha!"
    assert translated(laughs).text == laughs and translated(laughs).stats.looped == 0
    explicit = {"max_pattern_size": 16, "min_count": 4}
    assert translated(laughs, repetition_detection=explicit).text == laughs
    assert translated(laughs, num_samples=2, temp=1.0)[0].finish_reason == "stop", "not cut"
    plain = translator().generate(looping.PREFIX + laughs, repetition_detection=explicit)
    assert plain.finish_reason == "repetition"
    more = translated(f"{laughs[:-1]}, the rain was late and white, and we ate.")
    assert more.stats.looped == 1 and more.text.startswith(laughs[:-1])


def test_a_failed_part_leaves_the_whole_source():
    text = f"{CATS} The old window was white, and the rain was late, and bread."
    result = translated(text)
    assert result.text == text and result.pieces[1].finish_reason == "error"
    assert "NaN" in result.pieces[1].error and result.stats.failed == 1
    (only,) = translated([text[len(CATS) + 1 :]])
    assert only.finish_reason == "error" and only.text == text[len(CATS) + 1 :]


@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
def test_a_seed_gives_one_text_and_each_part_has_its_own_random_numbers(draft):
    """The first word of a part is drawn from two."""
    text, texts = "rain was late, " * 12, set()
    for seed in range(3):
        options = {"temp": 1.0, "seed": seed}
        plain = translated(text, **options)
        assert plain.stats.looped == 1
        decoded = translated([CATS, text], translator(draft), batch_size=3, **options)[1]
        alone = translated([CATS, text], batch_size=1, **options)[1]
        assert decoded.tokens == alone.tokens
        texts.add(plain.text)
        firsts = set(plain.text.rstrip(", ").split(", "))
        assert len(firsts) == 2, "some parts drew one word, some the other"
    assert len(texts) == 3


def test_beams_have_no_detection():
    with pytest.raises(UserError, match="num_beams cannot be combined with repetition_detection"):
        translated(CATS, num_beams=2, repetition_detection=DETECTION)
    result = translated(RAIN, num_beams=2, max_tokens=30)
    assert result.finish_reason == "length" and result.stats.looped == 0
    assert translated(CATS, num_beams=2, repetition_detection=None).text == CATS
    assert not math.isnan(result.stats.decode_seconds)
