"""The table of default drafts: each pays by its shape, and those that are left out do not."""

from pathlib import Path

import pytest

import main
from demo import grow
from mlx_t5.checkpoints.default_drafts import DRAFTS, default_draft
from mlx_t5.network.config import T5Config
from model import expected_parameters

# As config.json has them: d_model, d_ff, num_heads, d_kv, num_layers; of ByT5 decoder layers too.
V1_1 = {
    "small": (512, 1024, 6, 64, 8), "base": (768, 2048, 12, 64, 12),
    "large": (1024, 2816, 16, 64, 24), "xl": (2048, 5120, 32, 64, 24),
    "xxl": (4096, 10240, 64, 64, 24),
}  # fmt: skip
BYT5 = {
    "small": (1472, 3584, 6, 64, 12, 4), "base": (1536, 3968, 12, 64, 18, 6),
    "large": (1536, 3840, 16, 64, 36, 12), "xl": (2560, 6720, 32, 64, 36, 12),
    "xxl": (4672, 12352, 64, 64, 36, 12),
}  # fmt: skip
VOCABULARIES = {"flan-t5": 32128, "t5-v1_1": 32128, "mt5": 250112, "umt5": 256384}


def gated(*sizes: int) -> T5Config:
    """Of V1_1 or BYT5, behind the size of the vocabulary."""
    names = ("vocab_size", "d_model", "d_ff", "num_heads", "d_kv", "num_layers")
    shape = dict(zip((*names, "num_decoder_layers"), sizes, strict=False))
    return T5Config(**shape, feed_forward_proj="gated-gelu", tie_word_embeddings=False)


SHAPES = {
    **{
        f"google-t5/{name}": T5Config.from_dict({"model_type": "t5", **sizes})
        for name, sizes in grow.SHAPES.items()
        if sizes
    },
    **{
        f"google/{family}-{size}": gated(vocab_size, *shape)
        for family, vocab_size in VOCABULARIES.items()
        for size, shape in V1_1.items()
        if (family, size) != ("umt5", "large")  # there is none
    },
    **{f"google/byt5-{size}": gated(384, *shape) for size, shape in BYT5.items()},
}


def read_in_a_pass(name: str) -> int:
    """Weights that a decoder pass reads; cross-attention's keys and values it does not."""
    config = SHAPES[name]
    shapes = expected_parameters(config, separate_head=True)
    read = [
        rows * columns
        for part, (rows, columns) in ((n, s) for n, s in shapes.items() if len(s) == 2)
        if part == "lm_head.weight" or (part.startswith("decoder.layers") and ".norm" not in part)
        if not part.endswith(("cross_attention.k.weight", "cross_attention.v.weight"))
    ]
    return sum(read)


@pytest.mark.parametrize("name", [name for name in SHAPES if not name.endswith("small")])
def test_a_model_has_a_draft_if_that_is_ten_times_smaller(name):
    small = f"{name.rpartition('-')[0]}-small"
    cost = read_in_a_pass(small) / read_in_a_pass(name)
    assert DRAFTS.get(name) == (small if round(cost, 3) <= 0.1 else None)


def test_the_readme_has_the_table():
    rows = []
    for draft in dict.fromkeys(DRAFTS.values()):
        targets = [name.rpartition("/")[2] for name in DRAFTS if DRAFTS[name] == draft]
        rows.append(f"| {', '.join(targets)} | {draft} | ")
    readme = (Path(main.__file__).parent / "README.md").read_text("utf-8")
    assert [row for row in rows if row not in readme] == []


def test_names():
    assert set(DRAFTS) < set(SHAPES) and set(DRAFTS.values()) < set(SHAPES)
    for name in ("t5-3b", "google-t5/t5-3b"):
        assert default_draft(name) == "google-t5/t5-small"
    assert (
        default_draft("google/flan-t5-xl")
        == default_draft("flan-t5-xl")
        == ("google/flan-t5-small")
    )
    for name in ("flan-t5-small", "stranger/flan-t5-xl", "my-t5", "", "google/t5-3b"):
        assert default_draft(name) is None
