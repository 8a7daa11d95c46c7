"""A model split over 2 or 4 ranks gives the texts, scores and vectors of a single rank.

Other ranks compute different decisions, as unlike machines may: `sabotage`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import decoder
import shared_models
from decoder import SpeculativeDecoder
from devices import is_refusal
from launching import finish, launch, needs_ring
from mlx_t5.backend import mx
from mlx_t5.drafting.draft_model import DraftModel
from mlx_t5.drafting.source_copy import CopyOrDraft, SourceCopy
from mlx_t5.engine import beams
from mlx_t5.errors import UserError
from mlx_t5.machines.launched import join_ranks
from mlx_t5.network.interface import WeightsRead
from mlx_t5.network.ranks import ranks_of
from model import T5, load
from random_models import randomize

pytestmark = [needs_ring, pytest.mark.slow]
PROMPTS = [[5, 9, 13, 21, 9, 1], [7, 30, 30, 1], [40, 41, 42, 43, 44, 45, 46, 47, 1]]


def results(root: Path, name: str, model: Any, draft: T5) -> dict[str, Any]:
    """Returns the results of decoders with this target; the first model runs every variant."""
    short = {"max_tokens": 5}  # ranks that share cores wait long for each other
    record: dict[str, Any] = {}
    record["logits"] = model(mx.array([PROMPTS[0]]), mx.array([[0, 4, 7]])).tolist()
    decoder = SpeculativeDecoder(model, draft, num_draft=3)
    record["greedy"] = tokens(decoder.generate(PROMPTS, **short))
    own, _ = load(root / f"{name}-draft", shared_with=model)
    sharing = SpeculativeDecoder(model, own, num_draft=3)
    record["shared encoder"] = counted(sharing.generate(PROMPTS, **short))
    if name != "gated":
        return record
    record["sampled"] = tokens(decoder.generate(PROMPTS, temp=0.8, top_k=20, seed=4, **short))
    some = sharing.generate(PROMPTS, temp=0.8, seed=4, batch_size=2, **short)
    record["shared encoder, sampled"] = counted(some)
    small(own, ranks_of(model).rank)
    adapting = SpeculativeDecoder(model, own, num_draft="auto")
    record["auto"] = tokens(adapting.generate(PROMPTS, **short))
    record["auto, sampled"] = counted(adapting.generate(PROMPTS, temp=0.8, seed=4, **short))
    copying = SpeculativeDecoder(model, SourceCopy(), num_draft=4)
    record["lookup"] = tokens(copying.generate(PROMPTS, **short))
    answers = decoder.generate(PROMPTS, num_beams=3, num_return_sequences=2, **short)
    record["beams"], record["beam_scores"] = tokens(answers), [answer.score for answer in answers]
    scores = decoder.score(PROMPTS[:2], [[5, 6, 1], [8, 1]])
    record["scores"] = [score.token_logprobs for score in scores]
    both = CopyOrDraft(SourceCopy(), DraftModel(own, model))
    exact = SpeculativeDecoder(model, both, num_draft=3, exact=True)
    try:
        record["exact"] = counted(exact.generate(PROMPTS, batch_size=3, **short))
    except UserError as error:
        if not is_refusal(error):
            raise
        record["exact"] = None
    record["vectors"] = decoder.embed(PROMPTS).tolist()
    return record


def small(draft: T5, rank: int) -> None:
    """Makes "auto" expect free drafts on rank 0 and far too slow drafts on other ranks."""
    draft.weights_read = lambda: WeightsRead(rank * 10**6, 0, "float32")


def tokens(answers: Any) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def counted(answers: Any) -> list[tuple[list[int], int, int]]:
    """Returns the tokens of each result, and its numbers of proposed and accepted tokens."""
    return [(answer.tokens, answer.stats.drafted, answer.stats.accepted) for answer in answers]


def collectives(model: T5) -> list[int]:
    """Returns the numbers of collectives of an encoding, a cache and a decoder's pass."""
    counts = [model.ranks.collectives]
    states = model.encode(mx.array([PROMPTS[0]]))
    counts.append(model.ranks.collectives)
    cache = model.cache(states, capacity=4)
    counts.append(model.ranks.collectives)
    mx.eval(model.decode(mx.array([[0, 4, 7]]), cache, [0]))
    counts.append(model.ranks.collectives)
    return [b - a for a, b in zip(counts, counts[1:], strict=False)]


def sabotage(rank: int, draft: T5) -> None:
    """Makes a rank draft and decide differently from rank 0, as an unlike machine may."""
    if rank:
        accept, largest = decoder.accept, beams.largest
        decoder.accept = lambda *args: tuple((a + rank) % shared_models.V for a in accept(*args))
        beams.largest = lambda *args: tuple(array[:, ::-1] for array in largest(*args))
        randomize(draft, mx.random.split(mx.random.key(rank), 400), 0.1)


def run_rank(root: Path, names: list[str]) -> None:
    """Runs one rank of `mlx.launch` and writes its results."""
    ranks = join_ranks()
    draft, _ = load(root / "draft", "float32")
    sabotage(ranks.rank, draft)
    models, report = {}, {}
    for name in names:
        models[name], _ = load(root / name, shared_models.dtype_of(name), group=ranks.group)
        report[name] = results(root, name, models[name], draft)
    report["collectives"] = {name: collectives(model) for name, model in models.items()}
    report["answers"] = ranks.gathered([ranks.rank, "ä"]), ranks.any(ranks.rank == 1)
    (root / f"{ranks.rank}-of-{ranks.size}.json").write_text(json.dumps(report))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("ranks") / "models"
    root.mkdir()
    shared_models.make(root)
    return root


@pytest.fixture(scope="module")
def alone(root):
    """Returns the results of a single rank by model."""
    draft, _ = load(root / "draft", "float32")
    report = {}
    for name in ("gated", "quantized", "half", "tied"):
        model, _ = load(root / name, shared_models.dtype_of(name))
        report[name] = json_like(results(root, name, model, draft))
    return report


def json_like(value):
    return json.loads(json.dumps(value))


@pytest.fixture(scope="module", params=[2, 4])
def reports(request, root):
    """Returns the results of each of 2 or 4 ranks; 4 ranks run one model, as they are slow."""
    names = ["gated", "quantized", "half"] if request.param == 2 else ["tied"]
    _, err = finish(launch(request.param, __file__, str(root), *names))
    files = [root / f"{rank}-of-{request.param}.json" for rank in range(request.param)]
    assert all(file.exists() for file in files), err
    return [json.loads(file.read_text()) for file in files]


def assert_alike(record, expected, tolerance=2e-4):
    """Asserts equal results: tokens exactly, other numbers up to rounding."""
    for name, values in expected.items():
        if name in ("logits", "beam_scores", "vectors", "scores"):
            for a, b in zip(record[name], values, strict=True):
                np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance)
        elif not (name == "exact" and None in (record[name], values)):  # refused on one side
            assert record[name] == values, name


def test_several_ranks_give_the_results_of_one_rank(alone, reports):
    for name in reports[0].keys() & alone.keys():
        if name == "half":  # parts are rounded to 16 bits before they are added
            assert_alike(reports[0][name], {"logits": alone[name]["logits"]}, 0.05)
        else:
            assert_alike(reports[0][name], alone[name])


def test_every_rank_computes_the_same_bits(reports):
    assert all(report == reports[0] for report in reports[1:])


def test_each_half_block_and_the_head_need_one_collective(reports):
    config = shared_models.SHAPE
    encoder, decoder = 2 * config["num_layers"], 3 * config["num_decoder_layers"] + 1
    for counts in reports[0]["collectives"].values():
        assert counts == [encoder, 0, decoder]


def test_ranks_exchange_values(reports):
    everybody = [[rank, "ä"] for rank in range(len(reports))]
    assert all(report["answers"] == [everybody, True] for report in reports)


def test_drafts_that_share_the_encoder_are_accepted_now_and_then(alone):
    """The comparisons of the two tests above thus cover accepted and rejected drafts."""
    for name, record in alone.items():
        _, drafted, accepted = zip(*record["shared encoder"], strict=True)
        assert 0 < sum(accepted) < sum(drafted), name


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), sys.argv[2:])
