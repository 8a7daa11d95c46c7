"""On real T5s the engine writes the texts of transformers, with and without a draft."""

import copy
import dataclasses
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest

from mlx_t5.backend import mx, nn
from mlx_t5.checkpoints.quantization import quantize_predicate
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.drafting.source_copy import SourceCopy
from mlx_t5.errors import UserError
from mlx_t5.model import T5, load
from mlx_t5.network.sharing import shared_draft

torch = pytest.importorskip("torch")
from transformers import T5Config, T5ForConditionalGeneration  # noqa: E402

V, LONGEST = 61, 24
PROMPTS = [[7, 8, 9, 1], [30, 31, 1], list(range(20, 45)) + [1], [5, 1], [50, 2, 50, 2, 50, 1]]
NEVER = -1  # an end token that is never written
slow = pytest.mark.slow


# With a tied embedding a random T5 repeats its last token, and with wide random queries it attends
# to one place only; with these widths its greedy text has many different tokens.
SCALES = {"shared": 0.1, "relative": 1.0, ".q.": 0.3, ".o.": 2.0, ".wo.": 2.0, "": 1.0}


def part_of_a_product(name):
    return "shared" not in name and "relative" not in name


def reference(seed, perturbation=0.0):
    """Returns a tiny random T5 of transformers whose greedy text has many different tokens."""
    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=V, d_model=64, d_kv=64, d_ff=128, num_layers=2, num_heads=2,
        num_decoder_layers=2, decoder_start_token_id=0, eos_token_id=1,
        relative_attention_num_buckets=8, relative_attention_max_distance=20,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).eval()
    noise = torch.Generator().manual_seed(99)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "layer_norm" in name:
                weight.copy_(torch.rand(weight.shape) + 0.5)
                continue
            scale = next(s for part, s in SCALES.items() if part in name)
            if part_of_a_product(name):
                scale *= weight.shape[-1] ** -0.5
            weight.copy_(torch.randn(weight.shape) * scale)
            weight.add_(torch.randn(weight.shape, generator=noise) * scale * perturbation)
    model.generation_config.eos_token_id = None
    return model


@dataclasses.dataclass
class Pair:
    target: T5
    draft: T5
    reference: T5ForConditionalGeneration
    folder: Path  # the target's folder

    def expected(self, prompts, ends=(), masks=(), **rules):
        """Returns transformers' greedy texts of one batch: (tokens without end token, reason)."""
        rules = {RENAMED.get(name, name): value for name, value in rules.items()}
        masks = [mask or [1] * len(p) for p, mask in zip_longest(prompts, masks)]
        width = max(map(len, prompts))
        ids, mask = (
            torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
            for rows in (prompts, masks)
        )
        out = self.reference.generate(
            ids, attention_mask=mask, max_new_tokens=LONGEST, do_sample=False,
            eos_token_id=list(ends) or None, pad_token_id=0, **rules,
        )[:, 1:].tolist()  # fmt: skip
        first = [next((i for i, token in enumerate(row) if token in ends), None) for row in out]
        texts = zip(out, first, strict=True)
        return [(row, "length") if end is None else (row[:end], "stop") for row, end in texts]


RENAMED = {"min_tokens": "min_new_tokens"}


@pytest.fixture(scope="module", params=[1, pytest.param(5, marks=slow)])
def pair(request, tmp_path_factory):
    folders = [tmp_path_factory.mktemp("model") for _ in range(2)]
    hf_model = reference(request.param)
    hf_model.save_pretrained(folders[0])
    reference(request.param, perturbation=0.07).save_pretrained(folders[1])
    (target, _), (draft, _) = (load(folder, mx.float32) for folder in folders)
    return Pair(ending_with(target), ending_with(draft), hf_model, folders[0])


def ending_with(model, eos=NEVER, *more):
    """Returns a model with the same weights and other end tokens."""
    other = copy.copy(model)
    other.config = dataclasses.replace(model.config, eos_token_id=eos, more_eos_token_ids=more)
    return other


RULES = [
    {},
    {"repetition_penalty": 1.4},
    {"no_repeat_ngram_size": 2},
    {"repetition_penalty": 0.8, "no_repeat_ngram_size": 3, "min_tokens": 9},
]


@pytest.mark.slow
@pytest.mark.parametrize("rules", [RULES[0], *(pytest.param(r, marks=slow) for r in RULES[1:])])
def test_greedy_output_is_that_of_transformers(pair, rules):
    """The test covers one, several or no end tokens, all kinds of proposals and all lengths."""
    (free, _), *_ = pair.expected(PROMPTS)
    for ends in ((), (free[0],), (free[4],), (free[9], free[5])):
        expected = pair.expected(PROMPTS, ends, **rules)
        target, draft = ending_with(pair.target, *ends), ending_with(pair.draft, *ends[:1])
        for num_draft in (0, 1, 4):
            decoder = SpeculativeDecoder(target, draft if num_draft else None, None, num_draft or 1)
            for most in (LONGEST,) if rules else (1, 2, num_draft + 1, LONGEST):
                results = decoder.generate(PROMPTS, max_tokens=most, **rules)
                cut = [(t, r) if len(t) < most else (t[:most], "length") for t, r in expected]
                assert [(r.tokens, r.finish_reason) for r in results] == cut
    if rules:
        assert pair.expected(PROMPTS, **rules)[0][0] != free


def test_the_drafts_in_these_tests_are_neither_perfect_nor_useless(pair):
    results = SpeculativeDecoder(pair.target, pair.draft, None, 5).generate(PROMPTS, LONGEST)
    rate = sum(r.stats.accepted for r in results) / sum(r.stats.drafted for r in results)
    assert 0.2 < rate < 0.95
    assert len({token for result in results for token in result.tokens}) > 6


# Of each prompt: hidden inside, at the beginning, at many places, at the end; and nothing.
MASKS = [[1, 0, 1, 1], [0, 1, 1], [int(i % 4 > 1) for i in range(26)], [1, 0], None]


def with_masks(pair, **rules):
    return [tokens for tokens, _ in pair.expected(PROMPTS, masks=MASKS, **rules)]


def drafts(pair):
    """Returns no draft, one with its own encoder, one that reads the target's, and copies."""
    return None, pair.draft, shared_draft(pair.target, 1), SourceCopy(lookup=True)


def test_masked_tokens_are_ignored_as_in_transformers(pair):
    expected, unmasked = with_masks(pair), [tokens for tokens, _ in pair.expected(PROMPTS)]
    assert [a == b for a, b in zip(expected, unmasked, strict=True)] == [False] * 4 + [True]
    for draft in drafts(pair):
        decoder = SpeculativeDecoder(pair.target, draft, None, 3)
        for size in (1, 5):
            results = decoder.generate(PROMPTS, LONGEST, attention_mask=MASKS, batch_size=size)
            assert [r.tokens for r in results] == expected
        options = {"max_tokens": LONGEST, "attention_mask": np.array(MASKS[0], bool)}
        assert decoder.generate(PROMPTS[0], **options).tokens == expected[0]
        chunks = decoder.stream(PROMPTS[0], **options)
        assert [token for chunk in chunks for token in chunk.tokens] == expected[0]


def test_equal_tokens_with_different_masks_are_different_prompts(pair):
    masks = [[1, 0, 1, 1], None, [1, 1, 0, 1], [1, 1, 1, 1], [1, 0, 1, 1]]
    expected = [tokens for tokens, _ in pair.expected([PROMPTS[0]] * 5, masks=masks)]
    results = SpeculativeDecoder(pair.target, pair.draft, None, 3).generate(
        [PROMPTS[0]] * 5, LONGEST, attention_mask=masks
    )
    assert [r.tokens for r in results] == expected and expected[0] != expected[1] != expected[2]
    assert [r.stats.reused for r in results] == [0, 0, 0, 1, 1]


def test_masks_hold_for_beams_samples_and_exact_decoding(pair):
    beams = with_masks(pair, num_beams=3, length_penalty=0.8)
    rules = {"num_beams": 3, "length_penalty": 0.8}
    decoder = SpeculativeDecoder(pair.target, pair.draft, None, 3)
    results = decoder.generate(PROMPTS, LONGEST, attention_mask=MASKS, **rules)
    assert [r.tokens for r in results] == beams
    likeliest = {"temp": 1.0, "top_k": 1, "num_samples": 2, "attention_mask": MASKS}
    expected = with_masks(pair)
    results = decoder.generate(PROMPTS, LONGEST, **likeliest)
    assert [r.tokens for r in results] == [tokens for tokens in expected for _ in range(2)]
    try:
        exact = SpeculativeDecoder(pair.target, pair.draft, None, 3, exact=True)
        results = exact.generate(PROMPTS, LONGEST, attention_mask=MASKS)
    except UserError as error:
        assert "exact decoding is not possible here" in str(error)
    else:
        assert [r.tokens for r in results] == expected


def test_scores_and_vectors_ignore_masked_tokens(pair):
    decoder = SpeculativeDecoder(pair.target)
    scores = decoder.score(PROMPTS, [[7, 8, 9]] * 5, attention_mask=MASKS)
    vectors = decoder.embed(PROMPTS, attention_mask=MASKS)
    for prompt, mask, score, vector in zip(PROMPTS, MASKS, scores, vectors, strict=True):
        mask = torch.tensor([mask or [1] * len(prompt)])
        with torch.no_grad():
            out = pair.reference(
                torch.tensor([prompt]), mask, decoder_input_ids=torch.tensor([[0, 7, 8]])
            )
        logprobs = out.logits[0].log_softmax(-1)[range(3), [7, 8, 9]]
        assert score.token_logprobs == pytest.approx(logprobs.tolist(), abs=1e-3)
        mean = out.encoder_last_hidden_state[0][mask[0] > 0].mean(0)
        np.testing.assert_allclose(vector, mean.numpy(), atol=1e-3)


@slow
@pytest.mark.parametrize("mode", ["bfloat16", "4 bit"])
def test_rounding_may_only_break_ties(pair, mode):
    """Where half precision differs from regular decoding, two logits are almost equal."""
    target, _ = load(pair.folder, mx.bfloat16 if mode == "bfloat16" else mx.float32)
    target = ending_with(target)
    if mode == "4 bit":
        nn.quantize(target, group_size=32, bits=4, class_predicate=quantize_predicate)
    regular = SpeculativeDecoder(target).generate(PROMPTS, max_tokens=LONGEST)
    decoder = SpeculativeDecoder(target, pair.draft, None, 5)
    results = decoder.generate(PROMPTS, max_tokens=LONGEST)
    for prompt, a, b in zip(PROMPTS, regular, results, strict=True):
        check_first_difference(target, prompt, a.tokens, b.tokens)


def check_first_difference(model, prompt, a, b):
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            logits = model(mx.array([prompt]), mx.array([[0, *a[:i]]]))[0, -1]
            gap = abs(logits[x] - logits[y]).item()
            assert gap <= 2**-6 * mx.abs(logits).max().item()
            return


TEXTS = [
    "fix grammar: The childrens plays in the garden every days.",
    "translate English to French: The old teacher reads a long letter in the kitchen.",
    "fix grammar: He have bought two red car for him sister yesterday.",
    "translate English to French: Two doctors talk about the weather.",
    "fix grammar: We was walking slow to the station when it begin to rain.",
    "translate English to French: Why does she not open the window?",
]


def test_the_bundled_pair_samples_the_same_text_alone_and_in_a_batch(decoder):
    seeds = list(range(2 * len(TEXTS)))
    options = {"max_tokens": 40, "temp": 1.0, "num_draft": 5}
    together = decoder.generate(TEXTS * 2, seed=seeds, batch_size=6, **options)
    written = {origin for result in together for origin in result.origins}
    assert written == {"copy", "draft", "target"}
    for prompt, seed, result in zip(TEXTS * 2, seeds, together, strict=True):
        alone = decoder.generate(prompt, seed=seed, **options)
        assert (alone.tokens, alone.origins) == (result.tokens, result.origins), prompt


@pytest.mark.parametrize("num_draft", [0, 2, "auto"])
def test_the_bundled_pair_samples_the_same_text_without_its_draft(decoder, num_draft):
    options = {"max_tokens": 40, "temp": 0.8, "min_p": 0.01, "seed": 3}
    with_five = decoder.generate(TEXTS, num_draft=5, **options)
    assert sum(result.stats.accepted for result in with_five) > 20
    results = decoder.generate(TEXTS, num_draft=num_draft, **options)
    assert [r.tokens for r in results] == [r.tokens for r in with_five]
