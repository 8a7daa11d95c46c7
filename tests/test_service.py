"""Between requests and the thread, where no model is needed."""

import asyncio
from types import SimpleNamespace

import pytest

from pair import BUNDLED
from results import Settings
from serving.errors import ApiError
from serving.service import Limits, Service
from tokenizer_files import load_tokenizer


def served(vocab_size):
    """The service of a model with so many ids, and the bundled tokenizer."""
    model = SimpleNamespace(
        config=SimpleNamespace(vocab_size=vocab_size),
        shared=SimpleNamespace(weight=SimpleNamespace(dtype="mlx.core.float32")),
    )
    tokenizer = load_tokenizer(BUNDLED / "target")
    decoder = SimpleNamespace(model=model, tokenizer=tokenizer, drafter=None, defaults=Settings())
    worker = SimpleNamespace(start=lambda: decoder)
    return Service(worker, Limits(10, 10, 10), "a model", 5, 0.0), tokenizer


def test_an_id_that_the_tokenizer_does_not_have_has_no_text():
    service, tokenizer = served(len(load_tokenizer(BUNDLED / "target")) + 28)
    (token,) = tokenizer.encode("cat", add_special_tokens=False)[:1]
    assert service.spell(token).strip() and service.spell(token)[0] == " "
    assert service.spell(len(tokenizer) + 27) == ""


def test_a_text_at_which_the_tokenizer_panics_is_a_bad_request():
    service, _ = served(9)

    def panic(text):
        raise type("PanicException", (BaseException,), {})("byte index 3 is out of bounds")

    service._tokenizer = SimpleNamespace(encode=panic)
    with pytest.raises(ApiError, match="cannot read this prompt") as error:
        asyncio.run(service._token_ids("a"))
    assert error.value.status == 400
