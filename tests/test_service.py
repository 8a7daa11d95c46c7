"""Between requests and the thread, where no model is needed."""

from types import SimpleNamespace

from pair import BUNDLED
from results import Settings
from serving.service import Limits, Service
from text import load_tokenizer


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
    text, spelled = service.spell(token)
    assert text.strip() and text[0] == " " and bytes(spelled).decode() == text
    assert service.spell(len(tokenizer) + 27) == ("", None)
