"""Between requests and the thread, where no model is needed."""

import asyncio
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from mlx_t5.cli.models import BUNDLED
from mlx_t5.requests import Settings
from mlx_t5.serving import api
from mlx_t5.serving.errors import ApiError, error_of_validation
from mlx_t5.serving.service import RequestLimits, Service
from mlx_t5.text.tokenizer import load_tokenizer


def served(vocab_size):
    """The service of a model with so many ids, and the bundled tokenizer."""
    model = SimpleNamespace(
        config=SimpleNamespace(vocab_size=vocab_size),
        shared=SimpleNamespace(weight=SimpleNamespace(dtype="mlx.core.float32")),
    )
    tokenizer = load_tokenizer(BUNDLED / "target")
    decoder = SimpleNamespace(model=model, tokenizer=tokenizer, drafter=None, defaults=Settings())
    worker = SimpleNamespace(start=lambda: decoder)
    return Service(worker, RequestLimits(10, 10, 10), "a model", 0.0), tokenizer


def test_an_id_that_the_tokenizer_does_not_have_has_no_text():
    service, tokenizer = served(len(load_tokenizer(BUNDLED / "target")) + 28)
    (token,) = tokenizer.encode("cat", add_special_tokens=False)[:1]
    text, spelled = service.spell(token)
    assert text.strip() and text[0] == " " and bytes(spelled).decode() == text
    assert service.spell(len(tokenizer) + 27) == ("", None)


def test_a_text_at_which_the_tokenizer_panics_is_a_bad_request():
    service, _ = served(9)

    def panic(text):
        raise type("PanicException", (BaseException,), {})("byte index 3 is out of bounds")

    service._tokenizer = SimpleNamespace(encode=panic)
    with pytest.raises(ApiError, match="cannot read this prompt") as error:
        asyncio.run(service._token_ids("a"))
    assert error.value.status == 400


@pytest.mark.parametrize("temperature", [5e-324, 1e-46, 1e-45, 1e-40, 1e-38])
def test_a_temperature_that_float32_does_not_hold_is_refused(temperature):
    with pytest.raises(ValidationError) as refused:
        api.PredictRequest(prompt="x", temperature=temperature, max_tokens=5)
    error = error_of_validation(refused.value.errors()).body.error
    assert error.param == "temperature"
    assert error.message.startswith("temperature: it must be 0 (greedy), or a number from ")


@pytest.mark.parametrize(
    "extreme", [{"top_p": 5e-324}, {"delta": 5e-324}, {"num_draft": 16}, {"temperature": 1.2e-38}]
)
def test_whatever_else_the_schema_takes_can_be_decoded_with(extreme):
    service, _ = served(32)
    service.drafts = True
    settings = service._settings(api.PredictRequest(prompt="x", max_tokens=5, **extreme))
    assert settings.max_tokens == 5
