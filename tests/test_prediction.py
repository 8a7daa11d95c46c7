"""A prediction from the caller saves passes and changes nothing else."""

import pytest

from devices import exact_or_refused
from fake_model import EOS, FakeModel, drafter, random_table
from kinds import PREDICTIONS, SOURCES, V, drafters, rows, table_of
from mlx_t5.decoder import Engine, SpeculativeDecoder
from mlx_t5.disk import BUNDLED
from mlx_t5.drafting.costs import MOST
from mlx_t5.drafting.source_copy import SourceCopy
from mlx_t5.engine.rows import Row
from mlx_t5.errors import UserError
from mlx_t5.model import load
from mlx_t5.sampling.draws import row_key
from mlx_t5.settings import Settings
from mlx_t5.text.prompts import Prompt

PROMPT = (
    "translate English to French: Let's go to the store and buy some groceries including eggs, "
    "avocadoes, and bread."
)
OTHER = "translate English to French: I have two cats."
NONSENSE = "One two three four five six seven eight nine ten."


@pytest.fixture(scope="module")
def pair():
    target, tokenizer = load(BUNDLED / "target", "float32")
    return target, load(BUNDLED / "draft", "float32")[0], tokenizer


@pytest.fixture(scope="module")
def regular(pair):
    """Returns a decoder without a draft, because predictions need none."""
    target, _, tokenizer = pair
    return SpeculativeDecoder(target, None, tokenizer, 5)


@pytest.fixture(scope="module")
def text(regular):
    return regular.generate(PROMPT).text


def counts(result):
    speculation = result.stats.speculation
    return speculation.copied, speculation.copied_accepted, result.stats.target_calls


def in_text(result):
    return result.stats.speculation.predicted, result.stats.speculation.predicted_accepted


def test_a_right_prediction_needs_few_passes(regular, text, pair):
    plain = regular.generate(PROMPT)
    result = regular.generate(PROMPT, prediction=text)
    assert result.tokens == plain.tokens
    tokens = len(plain.tokens) + 1  # with the end token
    assert plain.stats.target_calls == tokens
    drafted, accepted, calls = counts(result)
    assert drafted == accepted == result.stats.accepted == tokens - tokens // 6
    assert calls == -(-tokens // 6), "5 proposals a step, all of them right"
    assert in_text(result) == (tokens - 1, tokens - 1), "the steps' own tokens too"
    assert set(result.origins) == {"copy", "target"}
    ids = [*plain.tokens, pair[2].eos_token_id]
    assert counts(regular.generate(PROMPT, prediction=ids)) == counts(result)
    assert counts(regular.generate(PROMPT, prediction=text, num_draft=15))[2] == -(-tokens // 16)
    unused = regular.generate(PROMPT, prediction=text, num_draft=0)
    assert (counts(unused), in_text(unused)) == ((0, 0, tokens), in_text(result))


def test_a_prediction_is_found_again_after_an_edit(regular, text):
    edited = text.replace("des provisions", "beaucoup de jolies provisions")
    assert edited != text
    result, plain = regular.generate(PROMPT, prediction=edited), regular.generate(PROMPT)
    assert result.tokens == plain.tokens
    assert result.stats.target_calls < plain.stats.target_calls / 2


@pytest.mark.slow
@pytest.mark.parametrize("num_draft", [5, "auto"])
def test_a_prediction_that_is_nonsense_is_soon_left_alone(
    pair, num_draft, monkeypatch, costs_of_a_cpu
):
    target, draft, tokenizer = pair
    decode, seconds = target.decode, [0.0]

    def timed(tokens, *arguments):
        seconds[0] += 0.8 + 0.2 * tokens.size
        return decode(tokens, *arguments)

    monkeypatch.setattr(target, "decode", timed)
    of_passes = {"clock": lambda: seconds[0]}
    looked_up = SpeculativeDecoder(target, SourceCopy(tokenizer), tokenizer, num_draft, **of_passes)
    for drafts in (None, draft):
        decoder = SpeculativeDecoder(target, drafts, tokenizer, num_draft, **of_passes)
        plain = decoder.generate(PROMPT)
        wrong = [decoder.generate(PROMPT, prediction=NONSENSE * 3) for _ in range(4)]
        assert all(result.tokens == plain.tokens for result in wrong)
        drafted = looked_up.generate(PROMPT).stats.drafted
        copied = [counts(result)[0] for result in wrong]
        if num_draft == "auto":  # proposed at full length at most once before it learns
            assert 0 < copied[0] <= drafted + MOST and copied[3] <= copied[0] / 2
        else:
            assert 0 < copied[0] <= max(drafted, MOST)


def test_the_draft_proposes_where_the_prediction_does_not(pair, text):
    target, draft, tokenizer = pair
    begin = text[: len(text) // 2]
    for copy in (None, SourceCopy(tokenizer)):
        decoder = SpeculativeDecoder(target, draft, tokenizer, 5, copy=copy)
        result = decoder.generate(PROMPT, prediction=begin)
        assert result.text == text
        assert set(result.origins) >= {"copy", "draft"}


def test_streams_and_samples_use_the_prediction_too(regular, text):
    *_, last = regular.stream(PROMPT, prediction=text)
    whole = regular.generate(PROMPT, prediction=text)
    assert (counts(last.result), in_text(last.result)) == (counts(whole), in_text(whole))
    options = {"temp": 0.3, "num_samples": 3, "prediction": text}
    assert all(counts(sample)[0] for sample in regular.generate(PROMPT, **options))


@pytest.mark.slow
@exact_or_refused
def test_exact_samples_are_the_same_with_and_without_a_prediction(pair, text):
    target, draft, tokenizer = pair
    options = {"temp": 1.2, "seed": 4, "batch_size": 2, "max_tokens": 20}
    written = {
        tuple(decoder.generate([PROMPT, OTHER], prediction=prediction, **options)[0].tokens)
        for decoder in (
            SpeculativeDecoder(target, drafts, tokenizer, 5, exact=True) for drafts in (None, draft)
        )
        for prediction in (None, [text, None], [NONSENSE, text])
    }
    assert len(written) == 1


def test_several_prompts_have_one_each_or_none(regular, text):
    first, second = regular.generate([PROMPT, OTHER], prediction=[text, None])
    assert counts(first)[1] > 15
    assert counts(second)[0] == 0 and second.stats.tokens_per_call == 1
    given = [Prompt(OTHER, prediction=text), OTHER, Prompt(OTHER, 2)]
    assert [counts(result)[0] > 0 for result in regular.results(given)] == [True, False, False]
    bad, good = regular.generate([PROMPT, OTHER], prediction=[[999_999], [3]])
    assert "999999 is outside the model's vocabulary" in bad.error and good.error is None


@pytest.mark.parametrize(
    "prompts, options, message",
    [
        (PROMPT, {"prediction": ""}, "a prediction is empty"),
        (PROMPT, {"prediction": []}, "a prediction is empty"),
        (PROMPT, {"prediction": 5}, "a prediction is 5; it must be a text or a list"),
        (PROMPT, {"prediction": [1.5]}, "1.5 is no whole number"),
        (PROMPT, {"prediction": [-1]}, "-1 is outside"),
        ([PROMPT, OTHER], {"prediction": OTHER}, "prediction is .* must be a list of 2, one a "),
        ([PROMPT, OTHER], {"prediction": [OTHER]}, "it must be a list of 2"),
        (
            PROMPT,
            {"prediction": OTHER, "num_beams": 2},
            "num_beams cannot be combined with prediction",
        ),
    ],
)
def test_bad_predictions_are_refused(regular, prompts, options, message):
    with pytest.raises(UserError, match=message):
        regular.generate(prompts, **options)


# ---- in a batch ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["none", "good", "copy", "copy or good"])
def test_a_prediction_does_not_change_other_rows(kind):
    """Other rows join before, with and after a row with a prediction, and run longer."""
    target = FakeModel(table_of(), V)
    draft, copy = drafters(target)[kind]
    decoder = SpeculativeDecoder(target, draft, None, 4, copy=copy)
    alone = [decoder.generate([source], max_tokens=20)[0].stats for source in SOURCES]
    engine, other_rows = decoder.engine(Settings()), rows(max_tokens=20, numbers=[4] * 5)
    predicted = Row(SOURCES[0], Settings(6, num_draft=4), row_key(0, 0), prediction=PREDICTIONS[0])
    engine.insert(other_rows[:2])
    engine.step()
    engine.insert([other_rows[2], predicted])
    engine.step()
    engine.insert(other_rows[3:4])
    while predicted in engine.rows:
        engine.step()
    assert engine.proposes == (kind != "none")
    engine.insert(other_rows[4:])
    while engine.rows:
        engine.step()
    assert predicted.stats.speculation.copied_accepted > 0
    for row, stats in zip(other_rows, alone, strict=True):
        assert row.stats.speculation == stats.speculation
        assert (row.stats.drafted, row.stats.target_calls) == (stats.drafted, stats.target_calls)


def test_a_row_that_waits_for_memory_keeps_its_prediction():
    target = FakeModel(table_of(), V)
    draft = drafter(random_table(V), target)
    engine = Engine(target, draft)
    row = Row(SOURCES[0], Settings(9, num_draft=4), row_key(0, 0), prediction=PREDICTIONS[0])
    other = Row(SOURCES[2], Settings(9, num_draft=4), row_key(0, 1), prediction=PREDICTIONS[2])
    engine.insert([other])
    encode, target.encode = target.encode, None
    with pytest.raises(TypeError):
        engine.insert([row])
    target.encode = encode
    engine.insert([row])
    while engine.rows:
        engine.step()
    assert row.stats.speculation.copied_accepted > 0 and row.tokens[-1] != EOS


def test_only_the_beginning_of_a_far_too_long_prediction_is_read():
    model, tokenizer = load(BUNDLED / "target")
    text = "fix grammar: She have two cat."
    decoder = SpeculativeDecoder(model, None, tokenizer)
    prediction = "She has two cats. " * 5000
    request, size = decoder.request(max_tokens=9), model.config.vocab_size
    (row,) = request.rows(Prompt(text, prediction=prediction), tokenizer, size)
    assert 9 < len(row.prediction) < 64 * 9
    assert decoder.generate(text, prediction=prediction).text == "She has two cats."
