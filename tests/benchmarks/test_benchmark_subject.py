"""Tests the decoders that are measured."""

from types import SimpleNamespace

import pytest

from benchmarks import subject
from benchmarks.subject import Subject, decoding, sentences
from benchmarks.workload import BOTH, DRAFT, LOOKUP, REGULAR
from command_line import byte_model
from mlx_t5.disk import BUNDLED
from mlx_t5.drafting.draft_model import DraftModel
from mlx_t5.drafting.source_copy import CopyOrDraft, SourceCopy
from mlx_t5.errors import UserError
from mlx_t5.network.layers import PASSES_BEFORE_COMPILING


class Decoder:
    """Records the calls that it gets."""

    def __init__(self, error=None):
        self.calls, self.error = [], error

    def job(self, seed, **settings):
        return {"seed": seed, **settings}

    def results(self, prompts, *how, **options):
        self.calls.append((prompts, *how, options))
        return [SimpleNamespace(error=self.error) for _ in prompts]


def test_every_prompt_has_a_seed_of_its_own_whatever_the_batch():
    turns = [["a", "b"], ["c"]]
    decoder = Decoder()
    run = decoding(decoder, turns, 2, temp=0.7)
    assert len(run(0)) == 2 and len(run(1)) == 1
    assert decoder.calls == [
        (["a", "b"], {"seed": [0, 1], "temp": 0.7}, 2, {"prediction": None}),
        (["c"], {"seed": [2], "temp": 0.7}, 2, {"prediction": None}),
    ]


def test_a_prompt_that_failed_ends_the_run():
    with pytest.raises(UserError, match=r"could not be decoded \(no memory\); leave it out"):
        decoding(Decoder("no memory"), [["a"]], 1)(0)


@pytest.fixture(scope="module")
def pair():
    return Subject.load(str(BUNDLED / "target"), str(BUNDLED / "draft"), "float32")


def test_layers_are_compiled_at_once(pair):
    assert pair.target.passes == pair.draft.passes == PASSES_BEFORE_COMPILING


def test_each_proposer_has_its_drafter(pair):
    kinds = {name: type(pair.drafter(name)) for name in (DRAFT, LOOKUP, BOTH)}
    assert kinds == {DRAFT: DraftModel, LOOKUP: SourceCopy, BOTH: CopyOrDraft}
    assert pair.decoder(REGULAR).drafter is None
    relaxed = pair.decoder(DRAFT, 3, 0.5).defaults
    assert (relaxed.num_draft, relaxed.delta) == (3, 0.5)


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


def test_mismatched_models_and_missing_tokenizers_are_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="vocabularies differ"):
        Subject.load(str(BUNDLED / "target"), str(byte_model(tmp_path / "bytes")), None)
    monkeypatch.setattr(subject, "load", lambda *_, **__: (None, None))
    with pytest.raises(UserError, match="has no tokenizer"):
        Subject.load(str(BUNDLED / "target"), str(BUNDLED / "draft"), None)
