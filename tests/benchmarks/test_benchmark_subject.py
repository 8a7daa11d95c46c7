"""Tests the decoders that are measured."""

import pytest

from benchmarks.subject import Subject, sentences
from benchmarks.workload import DRAFT, REGULAR
from mlx_t5.disk import BUNDLED
from mlx_t5.errors import UserError


@pytest.fixture(scope="module")
def pair():
    return Subject.load(str(BUNDLED / "target"), str(BUNDLED / "draft"), "float32")


def test_a_document_of_prompts_gives_the_answers_of_its_prompts(pair):
    texts = [f"fix grammar: {text}" for text in ("She have two cat.", "They has a dog.")]
    regular, options = pair.decoder(REGULAR), {"batch_size": 2, "max_tokens": 20}
    expected = [result.tokens for result in regular.generate(texts, **options)]
    assert all(expected)
    for decoder in (regular, pair.decoder(DRAFT, 3)):
        assert sentences(decoder, texts, **options) == expected
    for bad_texts in (["fix grammar: Two. Sentences.", texts[0]], [texts[0], "She have."]):
        with pytest.raises(UserError, match="not single sentences of one task"):
            sentences(regular, bad_texts, **options)
