"""Documents in a batch get the answers of each piece alone, in order; few pieces wait."""

import json
from dataclasses import asdict

import pytest

from command_line import ROOT
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.engine.rows import Stats
from mlx_t5.errors import UserError
from mlx_t5.text.prompts import Prompt

TASK = "translate English to French: "
LINES = [json.loads(line) for line in (ROOT / "demo" / "heldout.jsonl").open(encoding="utf-8")]
SENTENCES = [
    line["prompt"].removeprefix(TASK) for line in LINES if line["prompt"].startswith(TASK)
][:12]
TIMES = ("encode_seconds", "decode_seconds", "tokens_per_second", "peak_memory_bytes")


def counts(stats: Stats) -> dict:
    return {name: value for name, value in asdict(stats).items() if name not in TIMES}


@pytest.fixture(scope="module")
def alone(decoder):
    """Returns the result of every sentence decoded alone."""
    return [decoder.generate(TASK + sentence) for sentence in SENTENCES]


@pytest.mark.parametrize("split, between", [("sentences", "  "), ("lines", "\r\n\r\n\t")])
def test_a_document_is_its_sentences_in_one_batch(decoder, alone, split, between):
    text = between.join(SENTENCES) + "\n"
    result = decoder.generate(TASK + text, split=split, batch_size=3)
    assert result.text == between.join(one.text for one in alone) + "\n"
    assert result.tokens == [token for one in alone for token in one.tokens]
    assert result.finish_reason == "stop" and result.stats.pieces == len(SENTENCES)
    for name in ("prompt_tokens", "generated_tokens", "target_calls", "drafted", "accepted"):
        assert getattr(result.stats, name) == sum(getattr(one.stats, name) for one in alone)
    for piece, one, sentence in zip(result.pieces, alone, SENTENCES, strict=True):
        assert (TASK + text)[piece.start : piece.end] == sentence and piece.text == one.text


def test_documents_in_one_batch_equal_their_sentences_alone(decoder, alone):
    texts = [TASK + " ".join(SENTENCES[start : start + 4]) for start in (0, 4, 8)]
    results = decoder.generate([texts[0], "…", texts[1], "", [5], texts[2]], split="sentences")
    docs = [" ".join(one.text for one in alone[start : start + 4]) for start in (0, 4, 8)]
    assert [result.text for result in results] == [docs[0], "…", docs[1], "", None, docs[2]]
    assert "needs a text" in results[4].error and results[4].finish_reason == "error"
    assert not any(result.error for i, result in enumerate(results) if i != 4)


def test_a_document_is_complete_before_the_next_one_is_there(decoder, alone):
    there = True

    def prompts():
        nonlocal there
        yield TASK + " ".join(SENTENCES[:2])
        there = False
        yield TASK + SENTENCES[2]

    request = decoder.request(split="sentences")
    results = decoder.results(prompts(), request, 1, lambda: there)
    there = False
    assert next(results).text == f"{alone[0].text} {alone[1].text}" and not there
    assert next(results).text == alone[2].text


def test_a_stream_is_the_document_piece_by_piece(decoder):
    text = f"{TASK}- {SENTENCES[0]}\n\n{SENTENCES[1]} *** {SENTENCES[2]}\n"
    whole = decoder.generate(text, split="sentences")
    chunks = list(decoder.stream(text, split="sentences"))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [chunk.result is not None for chunk in chunks] == [False, False, True]
    assert [token for chunk in chunks for token in chunk.tokens] == whole.tokens
    assert counts(chunks[-1].result.stats) == counts(whole.stats)
    assert chunks[1].text == f"\n\n{whole.pieces[1].text}"
    for chunk in chunks:
        assert len(chunk.segments) == len(chunk.tokens) and any(chunk.segments)
        assert chunk.text.startswith("".join(chunk.segments))
    (only,) = decoder.stream("***\n", split="lines")
    assert only.text == only.result.text == "***\n"


def test_documents_can_be_decoded_with_beams(decoder):
    text, how = " ".join(SENTENCES[:2]), {"num_beams": 2, "max_tokens": 9}
    alone = [decoder.generate(TASK + one, **how).text for one in SENTENCES[:2]]
    streamed = decoder.stream(TASK + text, split="sentences", **how)
    assert "".join(chunk.text for chunk in streamed) == " ".join(alone)


def test_each_sampled_piece_has_its_own_random_stream(decoder):
    text = "\n".join([TASK + SENTENCES[0], *[SENTENCES[0]] * 5])
    how = {"split": "lines", "temp": 1.5, "seed": 3, "max_tokens": 12}
    first, second = decoder.generate([text, text], **how)
    assert len({piece.text for piece in first.pieces}) > 2 and first.text != second.text
    assert decoder.generate([text], batch_size=1, **how)[0].tokens == first.tokens
    (alone,) = decoder.results([Prompt(text, 1)], decoder.request(**how))
    assert alone.tokens == second.tokens, "by its place in the whole"
    own = decoder.generate(["One.", text], **{**how, "seed": [5, 3]})
    assert own[1].tokens == first.tokens, "by its own seed"
    prompt = decoder.generate(TASK + SENTENCES[0], **{**how, "split": "none"})
    assert prompt.text == first.pieces[0].text


def test_a_failed_piece_keeps_its_source(decoder):
    text = f"{TASK}{SENTENCES[0]} Bad\ud800 words. {SENTENCES[1]}"
    result = decoder.generate(text, split="sentences")
    first, bad, last = result.pieces
    assert result.text == f"{first.text} Bad\ud800 words. {last.text}"
    assert bad.finish_reason == "error" and "not valid Unicode" in bad.error
    assert (result.finish_reason, result.error) == ("stop", None)
    assert (result.stats.failed, result.stats.pieces) == (1, 3)
    for decode in decoder.generate, lambda *args, **how: list(decoder.stream(*args, **how)):
        with pytest.raises(UserError, match="not valid Unicode"):
            decode("\ud800a. \ud800b.", split="sentences")
    both = decoder.generate(["\ud800a. \ud800b.", TASK + SENTENCES[0]], split="sentences")
    assert both[0].finish_reason == "error" and both[0].text == "\ud800a. \ud800b."
    assert both[1].text == first.text


def test_a_possible_prefix_is_noted_once(decoder, capsys):
    decoder.generate(["title: My page.", "fix: this"], split="sentences")
    (note,) = capsys.readouterr().err.splitlines()
    assert note.startswith('note: "title:" is decoded as text')


def test_an_answer_without_the_address_of_its_source_is_not_used(decoder, alone):
    text = f"{SENTENCES[0]} Write to anna.b@example.org about it."
    result = decoder.generate(TASK + text, split="sentences")
    assert result.text == f"{alone[0].text} Write to anna.b@example.org about it."
    assert (result.stats.kept, result.stats.failed, result.stats.pieces) == (1, 0, 2)


def test_sentences_that_are_too_long_are_cut_and_counted(decoder):
    text = f"{SENTENCES[0]} " + " and ".join(SENTENCES[:3]).replace(". ", " ")
    result = decoder.generate([text], split="sentences", prefix=TASK, max_source_tokens=30)[0]
    assert result.stats.cut == result.stats.pieces - 1 >= 2
    assert result.stats.prompt_tokens <= 30 * result.stats.pieces


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_samples": 2, "temp": 1}, "num_samples and .* cannot be combined with split"),
        ({"num_beams": 2, "num_return_sequences": 2}, "num_return_sequences cannot be combined"),
        ({"prediction": "x"}, "prediction cannot be combined with split"),
        ({"split": "none", "prefix": "x"}, "prefix, .* need split"),
    ],
)
def test_settings_that_contradict_a_split_are_refused(decoder, options, message):
    with pytest.raises(UserError, match=message):
        decoder.generate("One. Two.", **{"split": "sentences", **options})


def test_a_split_needs_a_tokenizer(decoder):
    with pytest.raises(UserError, match="needs a tokenizer"):
        SpeculativeDecoder(decoder.model).generate("One.", split="lines")
