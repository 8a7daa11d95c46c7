"""Tests a search on literal scores, and against transformers on random models."""

import copy
import dataclasses
import random

import numpy as np
import pytest
import torch
import transformers

from families import FAMILIES
from mlx_t5.backend import mx
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.model import load
from mlx_t5.sampling.beam_search import NO_BEAM, BeamSearch, largest
from mlx_t5.settings import Settings

START, EOS, V = 0, 1, 10


def beam_search(num_beams=2, eos=(EOS,), **settings):
    return BeamSearch(Settings(num_beams=num_beams, **settings), START, eos)


def advance(search, *continuations):
    """Advances a search with continuations (score, beam, token), the best first."""
    rest = [NO_BEAM] * (search.looked_at - len(continuations))
    scores = [score for score, _, _ in continuations] + rest
    places = [k * V + token for _, k, token in continuations] + [0] * len(rest)
    search.advance(scores, places, V)


def texts(search):
    return [(text.tokens[1:], round(float(text.score), 4), text.reason) for text in search.texts]


def beams(search):
    return [(beam.tokens[1:], float(beam.score)) for beam in search.beams]


def test_texts_that_end_make_room_for_the_next_best_beams():
    search = beam_search()
    advance(search, (-1.0, 0, 5), (-1.5, 0, EOS), (-2.0, 0, 6), (-3.0, 0, 7))
    assert beams(search) == [([5], -1.0), ([6], -2.0)] and search.parents == [0, 0]
    assert texts(search) == [([EOS], -1.5, "stop")]
    # An end token past the first K is no text, but it also makes room.
    advance(search, (-2.5, 1, 5), (-3.0, 0, 7), (-3.5, 0, EOS), (-4.0, 0, 8))
    assert beams(search) == [([6, 5], -2.5), ([5, 7], -3.0)] and search.parents == [1, 0]
    assert texts(search) == [([EOS], -1.5, "stop")] and not search.done


@pytest.mark.parametrize(
    ("early_stopping", "max_tokens", "best", "done"),
    [
        (True, 9, -1.0, True),  # two texts are enough
        (False, 9, -1.0, False),  # -1.0 / 2 may become better than -3 / 2
        (False, 9, -3.5, True),
        ("never", 9, -3.5, False),  # -3.5 / 9 may become better
        ("never", 9, -13.6, True),
        ("never", 2, -3.5, True),  # the longest text is reached
    ],
)
def test_a_search_ends_when_its_texts_cannot_get_better(early_stopping, max_tokens, best, done):
    search = beam_search(early_stopping=early_stopping, max_tokens=max_tokens)
    advance(search, (-1.0, 0, 5), (-1.5, 0, EOS))
    advance(search, (-3.0, 0, EOS), (best, 0, 6))
    assert [float(text.score) for text in search.texts[:2]] == [-1.5, -1.5] or max_tokens == 2
    assert search.done == done


def test_forbidden_continuations_are_neither_beams_nor_texts():
    search = beam_search(num_beams=3)
    advance(search, (-1.0, 0, 5), (-2.0, 0, EOS))
    assert beams(search) == [([5], -1.0), ([5], NO_BEAM), ([5], NO_BEAM)]
    assert search.parents == [0, 0, 0]
    advance(search)
    assert search.done and texts(search) == [([EOS], -2.0, "stop")]


@pytest.mark.parametrize("width", [1, 100, 128, 1000])
@pytest.mark.parametrize("count", [1, 2, 17])
def test_the_largest_values_and_their_places_are_found(width, count):
    values = np.random.default_rng(width).normal(size=(3, width)).astype(np.float32)
    values[1] = np.arange(width) // 7  # ties: the first value comes first
    values[2, 1:] = -np.inf
    count = min(count, width)
    top_values, places = largest(mx.array(values), count)
    order = np.argsort(-values, axis=1, kind="stable")[:, :count]
    np.testing.assert_array_equal(np.array(top_values), np.take_along_axis(values, order, 1))
    np.testing.assert_array_equal(np.array(places)[0], order[0])
    assert (np.array(places) < max(width, 128)).all()
    np.testing.assert_array_equal(np.array(places)[2, :1], [0])


# ---- transformers --------------------------------------------------------------------------------


class Lift(transformers.LogitsProcessor):
    """Adds a bias; `twin` is the same processor for MLX."""

    def __init__(self, bias):
        self.bias, self.twin = torch.tensor(bias), lambda tokens, logits: logits + mx.array(bias)

    def __call__(self, input_ids, scores):
        return scores + self.bias


@dataclasses.dataclass
class Case:
    """A random call: some texts end at once, some never, and some must not end early."""

    prompts: list[list[int]]
    eos: list[int]
    lift: Lift
    options: dict

    @classmethod
    def draw(cls, rng, vocab_size):
        eos = rng.sample(range(2, vocab_size), rng.choice([1, 1, 2, 3]))
        bias = np.zeros(vocab_size, np.float32)
        bias[eos] += rng.choice([0, 2, 4, 6])
        num_beams, longest = rng.randint(2, 8), rng.randint(1, 12)
        prompts = [
            [rng.randrange(3, vocab_size) for _ in range(rng.randint(1, 14))]
            for _ in range(rng.randint(1, 4))
        ]
        options = {
            "num_beams": num_beams,
            "num_return_sequences": rng.randint(1, num_beams),
            "length_penalty": rng.choice([0.0, 1.0, -1.0, 0.6, 2.0]),
            "early_stopping": rng.choice([True, False, "never"]),
            "repetition_penalty": rng.choice([1.0, 1.7]),
            "no_repeat_ngram_size": rng.choice([0, 0, 1, 2]),
            "bad_words_ids": rng.choice([None, [[3], [eos[0]]], [[5, 6], [4, 4, 7], [8, 3]]]),
            "suppress_tokens": rng.choice([None, None, [3, 9]]),
            # Not if only one text would be possible.
            "forced_bos_token_id": rng.choice([None, min({5, 6, 7, 8} - {*eos})])
            if longest > 2
            else None,
            "forced_eos_token_id": rng.choice([None, eos[0]]) if longest > 1 else None,
        }
        limits = {"max_tokens": longest, "min_tokens": rng.choice([0, min(3, longest)])}
        return cls(prompts, eos, Lift(bias), options | limits)

    def theirs(self, model, pad):
        """Returns transformers' [(tokens, score)] with end tokens."""
        width = max(map(len, self.prompts))
        ids = torch.tensor([p + [pad] * (width - len(p)) for p in self.prompts])
        mask = torch.tensor([[1] * len(p) + [0] * (width - len(p)) for p in self.prompts])
        options = dict(self.options)
        least = options.pop("min_tokens")
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=options.pop("max_tokens"),
            min_new_tokens=least or None, do_sample=False, eos_token_id=self.eos,
            pad_token_id=pad, logits_processor=transformers.LogitsProcessorList([self.lift]),
            return_dict_in_generate=True, output_scores=True, **options,
        )  # fmt: skip
        lengths = (out.beam_indices >= 0).sum(dim=1).tolist()
        tokens = [row[1 : 1 + n].tolist() for row, n in zip(out.sequences, lengths, strict=True)]
        return tokens, out.sequences_scores.numpy()

    def ours(self, model, batch_size):
        ending = copy.copy(model)
        first, *more = self.eos
        ending.config = dataclasses.replace(
            model.config, eos_token_id=first, more_eos_token_ids=tuple(more)
        )
        return SpeculativeDecoder(ending).generate(
            self.prompts, batch_size=batch_size, logits_processors=[self.lift.twin], **self.options
        )


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_texts_and_scores_are_those_of_transformers(family, reference_of):
    reference = reference_of(family)
    model, _ = load(reference.folder, mx.float32)
    rng = random.Random(family.name)
    for _ in range(3):
        case = Case.draw(rng, family.raw["vocab_size"])
        tokens, scores = case.theirs(reference.model, family.raw["pad_token_id"])
        results = case.ours(model, batch_size=rng.choice([1, 2, 8]))
        for expected, score, result in zip(tokens, scores, results, strict=True):
            stopped = result.finish_reason == "stop"
            assert stopped == (expected[-1] in case.eos)
            assert result.tokens == expected[: len(expected) - stopped]
            assert result.score == pytest.approx(score, rel=1e-5, abs=1e-4)
