"""Tests settings: bad values are refused, good values become plain numbers, pages agree."""

import math
from dataclasses import fields
from fractions import Fraction

import numpy as np
import pytest

from fake_model import FakeModel, random_table
from mlx_t5.backend import mx
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.engine.rows import Row
from mlx_t5.errors import UserError
from mlx_t5.sampling import draws as sampling
from mlx_t5.settings import (
    LARGEST_COUNT,
    MAX_ROWS,
    SETTINGS,
    Repetition,
    Settings,
    checked,
    written,
)

V = 7
SOURCE = [2, 3, 4]
TABLE = random_table(V)

NOT_NUMBERS = [None, "5", "", b"5", [], (1,), {}, True, np.bool_(True), 1j, object(), mx.ones(2)]
NOT_FINITE = [math.nan, math.inf, -math.inf, np.float32("nan")]
NOT_WHOLE = [1.5, 2.0, np.float64(2), Fraction(3, 2)]
HUGE = 10**5000  # more digits than Python prints
BEYOND = {
    "max_tokens": [0, -1, np.int8(-1)],
    "temp": [-0.1, 1e-46, 1e-45, 1e-40, 1e-38, 1e39, HUGE, np.float32(1e-40)],
    "top_k": [-1, -HUGE],
    "top_p": [0.0, 0, -0.1, 1.0000001, HUGE],
    "min_p": [-0.1, 1.0000001, HUGE],
    "delta": [-0.1, 1.5, -1e-300],
    "num_draft": [-1, "AUTO"],
    "repetition_penalty": [0.0, -1, 1e-300, 1e-31, 1.1e30, HUGE],
    "no_repeat_ngram_size": [-1],
    "min_tokens": [-1],
    "num_beams": [0, -1, MAX_ROWS + 1],
    "length_penalty": [-10.1, 11, HUGE],
    "early_stopping": [0, 1, "always"],
    "num_return_sequences": [0, -1],
    "batch_size": [0, -5],
    "num_samples": [0, -1],
    "seed": [-1, 2**64, HUGE],
}
OF_THE_CALL = ("batch_size", "num_samples", "seed")


def bad_values(name):
    """Returns values of every wrong kind and values out of range."""
    kind = SETTINGS[name].range.kind
    wrong = [v for v in NOT_NUMBERS if not (kind is bool and isinstance(v, bool | np.bool_))]
    if name == "num_draft":  # None means "auto"
        wrong = [value for value in wrong if value is not None]
    if name == "seed":  # may be several seeds
        wrong = [value for value in wrong if not isinstance(value, list | tuple | mx.array)]
    return wrong + NOT_FINITE + (NOT_WHOLE if kind is int else []) + BEYOND[name]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_bad_value_is_refused_in_one_line(name):
    decoder = SpeculativeDecoder(FakeModel(TABLE, V))
    assert set(BEYOND) == set(SETTINGS)
    for value in bad_values(name):
        with pytest.raises(UserError) as caught:
            decoder.generate(SOURCE, **{name: value})
        message = str(caught.value)
        assert message.startswith(f"{name} is "), (value, message)
        assert message.endswith(f"; it must be {SETTINGS[name].range.expected}")
        assert message.isprintable() and len(message) < 200
        if name not in OF_THE_CALL:
            with pytest.raises(UserError, match=f"^{name} is "):
                Settings(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "plain"),
    [
        ("max_tokens", np.int64(3), 3),
        ("max_tokens", np.array(3), 3),
        ("max_tokens", mx.array(3), 3),
        ("temp", np.float16(0), 0.0),
        ("temp", 1, 1.0),
        ("temp", 2.0**-126, 2.0**-126),
        ("temp", Fraction(1, 2), 0.5),
        ("top_k", HUGE, LARGEST_COUNT),
        ("top_p", 5e-324, 2.0**-126),
        ("num_draft", np.str_("auto"), "auto"),
        ("num_draft", 10**20, LARGEST_COUNT),
        ("repetition_penalty", 1e-30, 1e-30),
        ("early_stopping", np.bool_(False), False),
        ("batch_size", 10**20, MAX_ROWS),
        ("num_samples", 10**20, 10**20),
        ("seed", np.uint64(2**64 - 1), 2**64 - 1),
    ],
    ids=written,
)
def test_a_good_value_becomes_a_plain_number_that_means_the_same(name, value, plain):
    fitting = checked(name, value, SETTINGS[name].range)
    assert (fitting, type(fitting)) == (plain, type(plain))
    if name not in OF_THE_CALL:
        assert getattr(Settings(**{name: value}), name) == plain


@pytest.mark.parametrize("value", [None, 5, b"a", [None], [5], {"a": 1}])
def test_bad_stop_strings_and_processors_are_refused(value):
    for name, values in (("stop", [value, "", [""]]), ("logits_processors", [value, "ab", print])):
        for value in values:
            with pytest.raises(UserError, match=f"^{name} is .*; it must be a "):
                Settings(**{name: value})


def test_stop_strings_and_processors_may_be_any_iterable():
    assert Settings(stop=(s for s in ("a", "b"))).stop == ("a", "b")
    assert Settings(stop="ab").stop == ("ab",)
    assert Settings(stop=np.array(["a"])).stop == ("a",)
    assert Settings(logits_processors=iter([min, max])).logits_processors == (min, max)


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_an_unknown_argument_is_refused_by_the_call(call):
    with pytest.raises(TypeError, match=r"got an unexpected keyword argument 'foo'$"):
        getattr(SpeculativeDecoder(FakeModel(TABLE, V)), call)(SOURCE, foo=1)
    for other, own in {"max_new_tokens": "max_tokens", "batchsize": "batch_size"}.items():
        with pytest.raises(TypeError, match=f"argument '{other}'; did you mean {own}\\?"):
            getattr(SpeculativeDecoder(FakeModel(TABLE, V)), call)(SOURCE, **{other: 1})


def test_help_names_every_setting_and_has_an_example():
    for setting in fields(Settings):
        assert f"{setting.name}" in SpeculativeDecoder.request.__doc__
    assert "= SpeculativeDecoder.from_pretrained(" in SpeculativeDecoder.__doc__


# ---- effects -------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_p", [1e-300, 1e-46, 1e-40, 1e-20])
@pytest.mark.parametrize("temp", [2.0**-126, 1e-30, 1.0])
def test_a_tiny_mass_leaves_the_likeliest_token(temp, top_p):
    logits = mx.array([[[300.0, 299.9, -200.0]]])
    row = Row([5], Settings(temp=temp, top_p=top_p), sampling.row_key(0, 0))
    p, _ = sampling.probabilities(logits, sampling.Sampling.of([row.settings]))
    assert p.tolist() == [[[1.0, 0.0, 0.0]]]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"max_pattern_size": 4}, "min_count is 0; it must be 2 or more"),
        ({"max_pattern_size": 4, "min_count": 1}, "min_count is 1; it must be 2 or more"),
        (
            {"max_pattern_size": 4, "min_pattern_size": 5, "min_count": 3},
            "min_pattern_size is 5; it must be max_pattern_size (4) at most",
        ),
        ({"min_pattern_size": 1}, "min_pattern_size is 1; it must be max_pattern_size (0) at most"),
        ({"max_pattern_size": -1, "min_count": 3}, "max_pattern_size is -1; it must be a whole"),
        ({"max_pattern_size": 4, "min_count": 3.0}, "min_count is 3.0; it must be a whole number"),
        ({"max_pattern_size": True, "min_count": 3}, "max_pattern_size is True; it must be a"),
        ({"size": 4}, "repetition_detection is {'size': 4}; it must be None or an object of max_"),
        ([4, 0, 3], "repetition_detection is [4, 0, 3]; it must be None or an object of max_patt"),
        ("4,3", "repetition_detection is '4,3'; it must be None or an object of max_pattern_size"),
        (4, "repetition_detection is 4; it must be None or an object of max_pattern_size, min_pa"),
    ],
)
def test_a_bad_repetition_detection_is_refused_in_one_line(value, message):
    with pytest.raises(UserError) as caught:
        Settings(repetition_detection=value)
    assert str(caught.value).startswith(message)


def test_repetition_detection_has_vllms_defaults_and_is_off_by_default():
    for off in (None, 0, {}, {"max_pattern_size": 0, "min_count": 1}, Repetition()):
        assert not Settings(repetition_detection=off).repetition_detection
    given = {"max_pattern_size": np.int32(4), "min_count": HUGE}
    assert Settings(repetition_detection=given).repetition_detection == Repetition(
        4, 0, LARGEST_COUNT
    )
    assert Repetition(4, 0, 3).sizes(99) == Repetition(4, 1, 3).sizes(99) == range(1, 5)
    assert not Settings().repetition_detection
    with pytest.raises(UserError, match="num_beams cannot be combined with repetition_detection"):
        Settings(num_beams=2, repetition_detection=given)
