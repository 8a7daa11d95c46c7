"""The decoders that are measured."""

from collections import Counter
from types import SimpleNamespace

import pytest

from benchmarks import subject
from benchmarks.subject import Passes, Run, Subject, decided, decoding
from benchmarks.workload import BOTH, DRAFT, LOOKUP, REGULAR
from command_line import byte_model
from mlx_t5.backend import REHEARSE
from mlx_t5.cli.models import BUNDLED
from mlx_t5.drafting.draft_model import DraftModel
from mlx_t5.drafting.source_copy import CopyOrDraft, SourceCopy
from mlx_t5.engine.rows import Result, Stats
from mlx_t5.errors import UserError
from mlx_t5.network.ranks import ALONE


class Decoder:
    """Remembers how it was asked."""

    def __init__(self, error=None):
        self.calls, self.error = [], error

    def results(self, prompts, **options):
        self.calls.append((prompts, options))
        return [SimpleNamespace(error=self.error) for _ in prompts]


def test_every_prompt_has_a_seed_of_its_own_whatever_the_batch():
    turns = [["a", "b"], ["c"]]
    decoder = Decoder()
    run = decoding(decoder, turns, 2, temp=0.7)
    assert len(run(0)) == 2 and len(run(1)) == 1
    common = {"batch_size": 2, "temp": 0.7}
    assert decoder.calls == [
        (["a", "b"], {"seed": [0, 1], **common}),
        (["c"], {"seed": [2], **common}),
    ]


def test_a_prompt_that_failed_ends_the_run():
    with pytest.raises(UserError, match=r"could not be decoded \(no memory\); leave it out"):
        decoding(Decoder("no memory"), [["a"]], 1)(0)


def test_the_tokens_of_a_run():
    one = Result(None, [5, 6], [], "stop", Stats(target_calls=2, tokens_per_call=1.5, drafted=4))
    two = Result(None, [5], [], "length", Stats(target_calls=1, tokens_per_call=1.0, accepted=1))
    assert decided(Run([one, two], Counter(), 0)) == 3 + 1


@pytest.fixture(scope="module")
def pair():
    return Subject.load(str(BUNDLED / "target"), str(BUNDLED / "draft"), "float32")


def test_proposers(pair):
    kinds = {name: type(pair.drafter(name)) for name in (DRAFT, LOOKUP, BOTH)}
    assert kinds == {DRAFT: DraftModel, LOOKUP: SourceCopy, BOTH: CopyOrDraft}
    assert pair.regular().drafter is None
    relaxed = pair.speculative(DRAFT, 3, 0.5).defaults
    assert (relaxed.num_draft, relaxed.delta) == (3, 0.5)


def test_the_passes_of_a_turn_are_counted(pair):
    turns = [["fix grammar: I has a dog."], ["fix grammar: She eat."]]
    regular, drafted = (pair.runs(name, 3, turns, max_tokens=9) for name in (REGULAR, DRAFT))
    for turn in (0, 1):
        first, second = regular(turn), drafted(turn)
        calls = first.results[0].stats.target_calls
        assert first.widths == {1: calls} and first.draft_passes == 0
        assert second.widths.total() == second.results[0].stats.target_calls < calls
        assert second.draft_passes >= second.results[0].stats.drafted > 0
        assert drafted(turn).draft_passes == second.draft_passes
        assert first.results[0].text == second.results[0].text


def test_models_that_do_not_belong_together_or_lack_a_tokenizer(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="vocabularies differ"):
        Subject.load(str(BUNDLED / "target"), str(byte_model(tmp_path / "bytes")), None)
    monkeypatch.setattr(subject, "load", lambda *_, **__: (None, None))
    with pytest.raises(UserError, match="has no tokenizer"):
        Subject.load(str(BUNDLED / "target"), str(BUNDLED / "draft"), None)


@pytest.mark.parametrize("name", [REGULAR, DRAFT, BOTH])
def test_the_count_is_the_same_where_passes_are_compiled_and_begun_early(pair, name, monkeypatch):
    turns = [["fix grammar: I has a dog."]]
    counted = []
    for rehearsing in ("", "1"):
        monkeypatch.setenv(REHEARSE, rehearsing)
        run = pair.runs(name, 3, turns, max_tokens=9)(0)
        counted.append((run.widths, run.draft_passes, [result.text for result in run.results]))
    assert counted[0] == counted[1]


def test_counting_passes_leaves_the_model_as_it_is():
    model = SimpleNamespace(
        config="c", ranks=ALONE, decode=lambda *rest, **options: (rest, options)
    )
    passes = Passes(model)
    assert passes.decode("tokens", "cache", [0], traced=True) == (
        ("tokens", "cache", [0]),
        {"traced": True},
    )
    assert passes.config == "c" and passes.count == 1
