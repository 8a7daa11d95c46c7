"""Tests `demo.grow`: a larger model of the published sizes has the same logits."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from checkpoints import siblings
from convert import convert
from demo import grow
from demo.widening import SIZES, Widening
from mlx_t5.backend import mx
from mlx_t5.checkpoints import writing
from mlx_t5.checkpoints.reading import read_weights
from mlx_t5.disk import TOKENIZER_FILES
from mlx_t5.errors import UserError
from mlx_t5.network.config import T5Config
from mlx_t5.network.weights import read_config
from model import expected_parameters, load

DEMO = Path(grow.__file__).parent
# Larger than both models of the pair in every size, and without common divisors.
ODD = dict(zip(SIZES, (3111, 301, 1103, 5, 71, 4, 5), strict=True))


def logits(folder: Path, dtype: str = "float32") -> np.ndarray:
    """Returns a model's logits for two prompts, one of them padded, and arbitrary answers."""
    model, _ = load(folder, dtype)
    ids = mx.array(np.random.default_rng(0).integers(3, 96, (2, 30)))  # all families have 96 ids
    mask = mx.arange(30)[None] < mx.array([[30], [17]])
    return np.array(model(ids, ids[:, ::3], mask))


def difference(folder: Path, source: Path, dtype: str = "float32") -> float:
    """Returns the largest difference between two models' logits, in standard deviations.

    Tokens that only the larger model has must have probability zero.
    """
    small, large = logits(source), logits(folder, dtype)
    assert np.all(large[..., small.shape[-1] :] < -1000)
    return np.abs(large[..., : small.shape[-1]] - small).max() / small.std()


@pytest.fixture(scope="module")
def odd(tmp_path_factory) -> Path:
    """Returns the target grown in every size."""
    folder = tmp_path_factory.mktemp("grown") / "odd"
    grow.grow(DEMO / "target", folder, ODD)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """Returns the target in the shape of t5-small."""
    folder = tmp_path_factory.mktemp("grown") / "small"
    assert grow.main(["--shape", "t5-small", "--path", str(folder)]) == 0
    return folder


# -- the same function -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SIZES, None])
def test_one_size_at_a_time_or_none_can_grow(tmp_path, name):
    sizes = {name: ODD[name]} if name else {}
    sizes |= {"d_model": 98} if name == "vocab_size" else {}
    grow.grow(DEMO / "draft", tmp_path / "out", sizes)
    assert difference(tmp_path / "out", DEMO / "draft") < (2e-5 if name else 1e-30)
    config, before = (read_config(folder) for folder in (tmp_path / "out", DEMO / "draft"))
    assert {name: config[name] for name in SIZES} == {name: before[name] for name in SIZES} | sizes


@pytest.mark.slow
def test_every_family_can_grow(reference, tmp_path):
    """The families include gated, untied and unscaled models, and umT5's bias in every layer."""
    raw = read_config(reference.folder)
    sizes = {name: raw.get(name, raw["num_layers"]) + 5 for name in SIZES}
    grow.grow(reference.folder, tmp_path / "out", sizes)
    assert difference(tmp_path / "out", reference.folder) < 2e-5


@pytest.mark.slow
def test_all_sizes_can_grow_at_once_and_be_converted(odd, tmp_path):
    assert difference(odd, DEMO / "target") < 2e-5
    assert {name: getattr(load(odd)[0].config, name) for name in SIZES} == ODD
    exact = convert(odd, tmp_path / "float32", dtype="float32")
    assert np.array_equal(logits(exact), logits(odd))
    assert difference(convert(odd, tmp_path / "bfloat16"), DEMO / "target") < 0.1
    sizes = {"d_model": 128, "vocab_size": 3200, "d_ff": 320, "num_heads": 3, "num_layers": 3}
    grow.grow(DEMO / "draft", tmp_path / "even", sizes)  # row lengths that divide into groups
    quantized = convert(tmp_path / "even", tmp_path / "quantized", quantize=True, q_bits=8)
    assert difference(quantized, DEMO / "draft") < 0.2


HALF = {"vocab_size": 3200, "d_model": 128}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "dtype", "computed", "tolerance"),
    [
        # The norms are halved here, which is exact in every type, as for t5-large, 3b and 11b.
        ("target", ODD | {"d_model": 1024}, "bfloat16", "float32", 2e-5),
        ("draft", HALF, "bfloat16", "bfloat16", 0.1),
        ("draft", HALF, "float16", "float16", 0.1),
    ],
)
def test_growing_keeps_the_function_in_16_bit_types(
    tmp_path, name, sizes, dtype, computed, tolerance
):
    """New tokens keep probability zero, and at four times the width no precision is lost."""
    grow.grow(DEMO / name, tmp_path / "out", sizes, dtype=dtype)
    assert difference(tmp_path / "out", DEMO / name, computed) < tolerance


def test_growing_keeps_the_function_with_a_large_epsilon(tmp_path):
    """With a large epsilon, the value that replaces a part of it is exact in every type."""
    shutil.copytree(DEMO / "draft", tmp_path / "in")
    raw = read_config(tmp_path / "in") | {"layer_norm_epsilon": 0.3}
    (tmp_path / "in" / "config.json").write_text(json.dumps(raw))
    sizes = {"d_model": 4 * 96, "vocab_size": 3073}
    grow.grow(tmp_path / "in", tmp_path / "out", sizes, dtype="bfloat16")
    assert difference(tmp_path / "out", tmp_path / "in") < 2e-5
    assert not np.allclose(logits(tmp_path / "in"), logits(DEMO / "draft"), atol=0.1)


# -- the shapes ------------------------------------------------------------------------------------


PARAMETERS = {  # as counted by the Hub in the published files
    "t5-small": 60_506_624, "t5-base": 222_903_552, "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336, "t5-11b": 11_307_321_344,
}  # fmt: skip


@pytest.mark.parametrize("name", ["target", "draft"])
def test_shapes_are_the_published_ones(name):
    source = T5Config.from_dict(read_config(DEMO / name))
    for shape, published in PARAMETERS.items():
        parameters = expected_parameters(Widening(source, grow.SHAPES[shape]).result, False)
        assert sum(map(math.prod, parameters.values())) == published


def test_the_grown_folder_has_the_files_and_sizes(small):
    assert {file.name for file in small.iterdir()} >= {"config.json", "model.safetensors"}
    for name in TOKENIZER_FILES:
        source, copy = DEMO / "target" / name, small / name
        assert source.exists() == copy.exists()
        assert not copy.exists() or copy.read_bytes() == source.read_bytes()
    before, after = read_config(DEMO / "target"), json.loads((small / "config.json").read_text())
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == {*SIZES, "layer_norm_epsilon", "dtype", "grown_from"} - {"d_kv"}
    assert after["grown_from"] == {name: before[name] for name in SIZES}
    assert list(after) == sorted(after) and after["dtype"] == "float32"


# -- what is written -------------------------------------------------------------------------------


def test_added_weights_look_like_other_weights(odd):
    """There are no zeros that kernels could skip, and no slow or overflowing numbers."""
    for name, tensor in read_weights(odd)[0].items():
        values = np.array(tensor)
        tiny = (values != 0) & (np.abs(values) < 1e-30)
        assert np.isfinite(values).all() and not tiny.any(), name
        if name.endswith((".k.weight", ".v.weight", ".wi.weight")):
            assert np.mean(values == 0) < 1e-4, name


@pytest.mark.slow
def test_the_same_seed_gives_the_same_numbers(odd, tmp_path, monkeypatch):
    paths = [tmp_path / name / "model.safetensors" for name in ("a", "b", "c")]
    for path, seed in zip(paths, (1, 1, 2), strict=True):
        grow.grow(DEMO / "draft", path.parent, ODD, seed=seed)
    first, again, other = (path.read_bytes() for path in paths)
    assert first == again and first != other
    monkeypatch.setattr(writing, "SHARD_BYTES", 3_000_000)
    grow.grow(DEMO / "target", tmp_path / "out", ODD)
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 5 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    (one, _), (many, metadata) = read_weights(odd), read_weights(tmp_path / "out")
    assert set(one) == set(many) and metadata == {"format": "pt"}
    assert all(mx.array_equal(one[name], many[name]) for name in one)


# -- refusals --------------------------------------------------------------------------------------


def test_the_source_is_safe_on_a_disk_that_ignores_case(tmp_path, respelled):
    copy = shutil.copytree(DEMO / "draft", tmp_path / "copy")
    with pytest.raises(UserError, match="is the source"):
        grow.grow(copy, respelled(copy), {}, overwrite=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (["--d-ff", "1023"], "d_ff 1023 is less than the source's 1024; models only grow"),
        (["--shape", "t5-base", "--num-decoder-layers", "2"], "num_decoder_layers 2 is less than"),
        (["--vocab-size", "3073"], "a larger vocab_size needs a d_model of at least 258, not 256"),
        (["--d-model", "99999999"], "d_model must be an integer between 1 and 16777216"),
        (["--seed", "-1"], "the seed must be 0 or more, not -1"),
        (["--from", "nowhere"], "cannot read nowhere/config.json"),
        (["--from", "mlx"], "the source is an MLX folder; grow the Hugging Face original"),
        (["--from", "copy", "--path", "copy", "--overwrite"], "copy is the source, contains it"),
        (["--path", "there"], "there exists; replace it with --overwrite or choose another folder"),
        (["--shape", "t5"], "invalid choice: 't5'"),
    ),
)
def test_bad_input_is_one_line_and_status_2(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    shutil.copytree(DEMO / "draft", tmp_path / "copy")
    if "mlx" in arguments:
        convert(DEMO / "draft", tmp_path / "mlx")
    before = siblings(tmp_path / "x")
    try:
        status = grow.main(["--from", str(DEMO / "target"), "--path", "out", *arguments])
    except SystemExit as exit:  # argparse
        status = exit.code
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ") and message in err
    assert siblings(tmp_path / "x") == before


def test_an_existing_folder_is_overwritten_on_request(tmp_path, capsys):
    arguments = ["--from", str(DEMO / "draft"), "--path", str(tmp_path / "out")]
    assert grow.main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{tmp_path / 'out'}\n"
    assert captured.err == f"639,968 parameters; {DEMO / 'draft'} computes it with 639,968\n"
    assert grow.main([*arguments, "--overwrite", "--d-ff", "300", "--dtype", "bfloat16"]) == 0
    config = read_config(tmp_path / "out")
    assert (config["d_ff"], config["dtype"]) == (300, "bfloat16")
