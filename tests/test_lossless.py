"""The engine on real T5s: equal to transformers' own `generate`, and to itself without a draft."""

import copy
import dataclasses
from pathlib import Path

import pytest

from decoder import SpeculativeDecoder
from mlx_t5.backend import mx, nn
from mlx_t5.checkpoints.quantization import quantize_predicate
from model import T5, load

torch = pytest.importorskip("torch")
from transformers import T5Config, T5ForConditionalGeneration  # noqa: E402

V, LONGEST = 61, 24
PROMPTS = [[7, 8, 9, 1], [30, 31, 1], list(range(20, 45)) + [1], [5, 1], [50, 2, 50, 2, 50, 1]]
NEVER = -1  # an end token that is never written


# With a tied embedding a random T5 repeats its last token, and with wide random queries it looks
# at one place only; these widths make its greedy text lively.
SCALES = {"shared": 0.1, "relative": 1.0, ".q.": 0.3, ".o.": 2.0, ".wo.": 2.0, "": 1.0}


def part_of_a_product(name):
    return "shared" not in name and "relative" not in name


def reference(seed, perturbation=0.0):
    """A tiny random T5 of transformers whose greedy output is lively."""
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
    free: list[list[int]]  # transformers' greedy tokens for PROMPTS, never ended
    theirs: T5ForConditionalGeneration
    folder: Path  # of the target


@pytest.fixture(scope="module", params=[1, 3, 5])
def pair(request, tmp_path_factory):
    folders = [tmp_path_factory.mktemp("model") for _ in range(2)]
    theirs = reference(request.param)
    theirs.save_pretrained(folders[0])
    reference(request.param, perturbation=0.07).save_pretrained(folders[1])
    free = []
    for prompt in PROMPTS:
        out = theirs.generate(torch.tensor([prompt]), max_new_tokens=LONGEST, do_sample=False)
        free.append(out[0, 1:].tolist())
    (target, _), (draft, _) = (load(folder, mx.float32) for folder in folders)
    return Pair(ending_with(target, NEVER), ending_with(draft, NEVER), free, theirs, folders[0])


def ending_with(model, eos):
    """The same weights with another end token."""
    other = copy.copy(model)
    other.config = dataclasses.replace(model.config, eos_token_id=eos)
    return other


def until(tokens, eos, max_tokens):
    tokens = tokens[:max_tokens]
    if eos in tokens:
        return tokens[: tokens.index(eos)], "stop"
    return tokens, "length"


@pytest.mark.slow
@pytest.mark.parametrize("num_draft", range(1, 9))
def test_greedy_output_is_that_of_transformers(pair, num_draft):
    ends = [NEVER] + [pair.free[0][k] for k in (0, 1, 4, 11)]
    for eos in dict.fromkeys(ends):
        target, draft = ending_with(pair.target, eos), ending_with(pair.draft, eos)
        decoder = SpeculativeDecoder(target, draft, None, num_draft)
        for max_tokens in (1, 2, num_draft + 1, LONGEST):
            results = decoder.generate(PROMPTS, max_tokens=max_tokens)
            for free, result in zip(pair.free, results, strict=True):
                assert (result.tokens, result.finish_reason) == until(free, eos, max_tokens)


def test_the_drafts_in_these_tests_are_neither_perfect_nor_useless(pair):
    stats = [r.stats for r in SpeculativeDecoder(pair.target, pair.draft).generate(PROMPTS, 24)]
    rate = sum(s.accepted for s in stats) / sum(s.drafted for s in stats)
    assert 0.2 < rate < 0.95
    assert len({token for free in pair.free for token in free}) > 6


def test_transformers_ends_where_we_do(pair):
    for prompt, free in zip(PROMPTS, pair.free, strict=True):
        eos = free[6]
        out = pair.theirs.generate(
            torch.tensor([prompt]), max_new_tokens=LONGEST, do_sample=False, eos_token_id=eos
        )[0, 1:].tolist()
        ours = SpeculativeDecoder(ending_with(pair.target, eos), ending_with(pair.draft, eos))
        result = ours.generate(prompt, max_tokens=LONGEST)
        assert result.tokens + [eos] * (result.finish_reason == "stop") == out


def test_several_end_tokens_end_as_in_transformers(pair):
    for prompt, free in zip(PROMPTS, pair.free, strict=True):
        ends = [NEVER, free[9], free[5]]
        out = pair.theirs.generate(
            torch.tensor([prompt]), max_new_tokens=LONGEST, do_sample=False, eos_token_id=ends
        )[0, 1:].tolist()
        target = ending_with(pair.target, NEVER)
        target.config = dataclasses.replace(target.config, more_eos_token_ids=tuple(ends[1:]))
        result = SpeculativeDecoder(target, pair.draft).generate(prompt, max_tokens=LONGEST)
        assert result.tokens == out[:-1] and out[-1] in ends and result.finish_reason == "stop"


def test_regular_decoding_is_that_of_transformers(pair):
    results = SpeculativeDecoder(pair.target).generate(PROMPTS, max_tokens=LONGEST)
    assert [r.tokens for r in results] == pair.free


@pytest.mark.slow
@pytest.mark.parametrize(
    "rules",
    [
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 2},
        {"repetition_penalty": 0.8, "no_repeat_ngram_size": 3, "min_tokens": 9},
    ],
)
def test_processed_greedy_output_is_that_of_transformers(pair, rules):
    eos = pair.free[0][4]
    target, draft = ending_with(pair.target, eos), ending_with(pair.draft, eos)
    first, *others = (
        SpeculativeDecoder(target, draft, None, num_draft).generate(
            PROMPTS, max_tokens=LONGEST, **rules
        )
        for num_draft in (1, 2, 4, 7)
    )
    names = {"min_tokens": "min_new_tokens"}
    theirs = {names.get(name, name): value for name, value in rules.items()}
    for prompt, result in zip(PROMPTS, first, strict=True):
        out = pair.theirs.generate(
            torch.tensor([prompt]), max_new_tokens=LONGEST, do_sample=False, eos_token_id=eos,
            **theirs,
        )[0, 1:].tolist()  # fmt: skip
        assert result.tokens + [eos] * (result.finish_reason == "stop") == out
    ends = [(r.tokens, r.finish_reason) for r in first]
    assert all([(r.tokens, r.finish_reason) for r in results] == ends for results in others)
    assert [r.tokens for r in first] != [until(f, eos, LONGEST)[0] for f in pair.free]


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [{"temp": 0.0}, {"temp": 0.8, "top_k": 20, "top_p": 0.9}])
def test_a_row_alone_equals_the_row_in_a_batch(pair, sampling):
    decoder = SpeculativeDecoder(pair.target, pair.draft, None, 3)
    seeds = list(range(len(PROMPTS)))
    together = decoder.generate(PROMPTS, max_tokens=LONGEST, seed=seeds, batch_size=3, **sampling)
    for prompt, seed, result in zip(PROMPTS, seeds, together, strict=True):
        alone = decoder.generate(prompt, max_tokens=LONGEST, seed=seed, **sampling)
        assert alone.tokens == result.tokens


def test_a_draft_equal_to_the_target_is_always_accepted(pair):
    decoder = SpeculativeDecoder(pair.target, pair.target, None, 4)
    for temp in (0.0, 1.0):
        for result in decoder.generate(PROMPTS, max_tokens=LONGEST, temp=temp):
            assert result.stats.acceptance_rate == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["bfloat16", "4 bit"])
def test_rounding_may_only_break_ties(pair, mode):
    """Where half precision differs from regular decoding, two logits were as good as equal."""
    target, _ = load(pair.folder, mx.bfloat16 if mode == "bfloat16" else mx.float32)
    target = ending_with(target, NEVER)
    if mode == "4 bit":
        nn.quantize(target, group_size=32, bits=4, class_predicate=quantize_predicate)
    regular = SpeculativeDecoder(target).generate(PROMPTS, max_tokens=LONGEST)
    ours = SpeculativeDecoder(target, pair.draft).generate(PROMPTS, max_tokens=LONGEST)
    for prompt, a, b in zip(PROMPTS, regular, ours, strict=True):
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


def test_a_sampled_text_of_the_bundled_pair_is_the_same_alone_and_in_a_batch(decoder):
    seeds = list(range(2 * len(TEXTS)))
    options = {"max_tokens": 40, "temp": 1.0, "num_draft": 5}
    together = decoder.generate(TEXTS * 2, seed=seeds, batch_size=6, **options)
    written = {writer for result in together for writer in result.writers}
    assert written == {"copy", "draft", "target"}
    for prompt, seed, result in zip(TEXTS * 2, seeds, together, strict=True):
        alone = decoder.generate(prompt, seed=seed, **options)
        assert (alone.tokens, alone.writers) == (result.tokens, result.writers), prompt
