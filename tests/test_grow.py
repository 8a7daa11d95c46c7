"""`demo.grow`: a larger model with the same logits, of the published sizes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from benchmarks.memory import MODELS
from checkpoints import siblings
from convert import convert
from demo import grow
from demo.widening import SIZES, Widening
from mlx_t5.backend import mx
from mlx_t5.checkpoints.checkpoint import open_checkpoint
from mlx_t5.checkpoints.small_files import TOKENIZER_FILES
from mlx_t5.network.config import T5Config
from mlx_t5.network.weights import read_config
from model import load

DEMO = Path(grow.__file__).parent
# More of everything than either of the pair has, and nothing a multiple of anything.
ODD = dict(zip(SIZES, (3111, 301, 1103, 5, 71, 4, 5), strict=True))


def logits(folder: Path, dtype: str = "float32") -> np.ndarray:
    """Of two prompts of different lengths, one of them padded, and of some answer."""
    model, _ = load(folder, dtype)
    ids = mx.array(np.random.default_rng(0).integers(3, 96, (2, 30)))  # 96: all that families have
    mask = mx.arange(30)[None] < mx.array([[30], [17]])
    return np.array(model(ids, ids[:, ::3], mask))


def difference(folder: Path, source: Path, dtype: str = "float32") -> float:
    """Largest difference between the logits of two models, in standard deviations of theirs.

    Tokens that only the larger model has must be out of reach: their probability is zero.
    """
    small, large = logits(source), logits(folder, dtype)
    assert np.all(large[..., small.shape[-1] :] < -1000)
    return np.abs(large[..., : small.shape[-1]] - small).max() / small.std()


@pytest.fixture(scope="module")
def odd(tmp_path_factory) -> Path:
    """The target, grown in every size."""
    folder = tmp_path_factory.mktemp("grown") / "odd"
    grow.grow(DEMO / "target", folder, ODD)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """The target in the shape of t5-small."""
    folder = tmp_path_factory.mktemp("grown") / "small"
    assert grow.main(["--shape", "t5-small", "--path", str(folder)]) == 0
    return folder


# -- the same function -----------------------------------------------------------------------------


@pytest.mark.slow
def test_every_family(reference, tmp_path):
    """Gated, untied, unscaled and umT5's bias in every layer."""
    raw = read_config(reference.folder)
    sizes = {name: raw.get(name, raw["num_layers"]) + 5 for name in SIZES}
    grow.grow(reference.folder, tmp_path / "out", sizes)
    assert difference(tmp_path / "out", reference.folder) < 2e-5


@pytest.mark.slow
def test_all_sizes_at_once_and_through_the_converter(odd, tmp_path):
    assert difference(odd, DEMO / "target") < 2e-5
    assert {name: getattr(load(odd)[0].config, name) for name in SIZES} == ODD
    exact = convert(odd, tmp_path / "float32", dtype="float32")
    assert np.array_equal(logits(exact), logits(odd))
    assert difference(convert(odd, tmp_path / "bfloat16"), DEMO / "target") < 0.1
    sizes = {"d_model": 128, "vocab_size": 3200, "d_ff": 320, "num_heads": 3, "num_layers": 3}
    grow.grow(DEMO / "draft", tmp_path / "even", sizes)  # rows that divide into groups
    quantized = convert(tmp_path / "even", tmp_path / "quantized", quantize=True, q_bits=8)
    assert difference(quantized, DEMO / "draft") < 0.2


# -- the shapes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [name for name in grow.SHAPES if name != "custom"])
def test_shapes_are_the_published_ones(shape):
    public, names = MODELS[shape], [name for name in SIZES if name != "vocab_size"]
    for name in ("target", "draft"):
        source = T5Config.from_dict(read_config(DEMO / name))
        result = Widening(source, grow.SHAPES[shape]).result
        assert [getattr(result, n) for n in names] == [getattr(public, n) for n in names]
        assert result.vocab_size == 32128


def test_folder(small):
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


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes_however_they_are_cut(odd, tmp_path, monkeypatch):
    paths = [tmp_path / name / "model.safetensors" for name in ("a", "b", "c")]
    for path, seed, block in zip(paths, (1, 1, 2), (grow.BLOCK_BYTES, 99_999, 99_999), strict=True):
        monkeypatch.setattr(grow, "BLOCK_BYTES", block)
        grow.grow(DEMO / "draft", path.parent, ODD, seed=seed)
    first, again, other = (path.read_bytes() for path in paths)
    assert first == again and first != other
    monkeypatch.setattr(grow, "SHARD_BYTES", 3_000_000)
    grow.grow(DEMO / "target", tmp_path / "out", ODD)
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 5 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    with open_checkpoint(odd) as one, open_checkpoint(tmp_path / "out") as many:
        assert set(one.names) == set(many.names) and many.metadata == {"format": "pt"}
        assert all(mx.array_equal(one.read(name), many.read(name)) for name in one.names)


# -- refusals --------------------------------------------------------------------------------------


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
        (["--from", "copy", "--path", "copy", "--overwrite"], "copy is the source, holds it"),
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
