"""LoRA adapters are merged as by PEFT: at conversion, at load and into quantized weights."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import adapters
import checkpoints
from checkpoints import TINY, arrays
from mlx_t5.backend import mx, tree_flatten
from mlx_t5.checkpoints.adapters import OTHERS
from mlx_t5.checkpoints.config import T5Config
from mlx_t5.checkpoints.names import tensor_names
from mlx_t5.convert import convert
from mlx_t5.errors import UserError
from mlx_t5.model import T5, load

Q = "decoder.block.1.layer.0.SelfAttention.q"
Q_LAYERS = {
    f"{stack}.block.{i}.layer.{j}.{kind}.q": (64, 64)
    for i in range(2)
    for stack, j, kind in (
        ("encoder", 0, "SelfAttention"),
        ("decoder", 0, "SelfAttention"),
        ("decoder", 1, "EncDecAttention"),
    )
}


@pytest.fixture(autouse=True)
def apart(monkeypatch):
    """Keeps loaded models from joining layers, so that every layer keeps its own name."""
    monkeypatch.setattr(T5, "join", lambda model: None)


@pytest.fixture
def adapter(tmp_path):
    """Returns an adapter of rank 1, whose products are exact on every device, and its matrices."""
    folder = tmp_path / "adapter"
    return folder, adapters.by_hand(folder, Q_LAYERS)


def parameters(folder, **options) -> dict[str, np.ndarray]:
    """Returns all parameters of a loaded model by this project's names."""
    model, _ = load(folder, **options)
    return {name: np.array(array) for name, array in tree_flatten(model.parameters())}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("t5", {"target_modules": ["q", "v"], "r": 3, "init_lora_weights": "gaussian"}),
        ("flan", {"target_modules": ["wi_0", Q], "use_rslora": True, "r": 4, "lora_alpha": 10}),
        ("flan", {"target_modules": "ALL-LINEAR", "r": 1, "init_lora_weights": "mica"}),
        ("t5", {"target_modules": ["v", Q], "bias": "lora_only"}),
        ("umt5", {"target_modules": "all-linear", "exclude_modules": ["k"]}),
        ("mt5", {"target_modules": "all-linear", "use_dora": True, "r": 2, "lora_alpha": 3}),
    ],
)
def test_merged_weights_equal_those_of_peft(reference_of, tmp_path, family, config):
    reference = reference_of(family)
    merged = adapters.by_peft(reference.model, tmp_path / "lora", **config)
    raw = json.loads((reference.folder / "config.json").read_text())
    names = tensor_names(T5Config.from_dict(raw))
    out = convert(reference.folder, tmp_path / "out", "float32", adapter_path=tmp_path / "lora")
    converted, before = arrays(out), parameters(reference.folder, dtype="float32")
    loaded = parameters(reference.folder, dtype="float32", adapter=tmp_path / "lora")
    changed = 0
    for name, array in loaded.items():
        hf_name = next(old for old, new in names.items() if new == name)
        expected = merged[hf_name].numpy()
        np.testing.assert_allclose(array, expected, rtol=2e-6, atol=2e-7, err_msg=hf_name)
        np.testing.assert_allclose(np.array(converted[name]), expected, rtol=2e-6, atol=2e-7)
        changed += np.abs(array - before[name]).max() > 1e-3
    lora = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    assert changed == sum("lora_A" in name for name in lora) > 0


def test_a_torch_file_gives_the_same_adapter_as_safetensors(tiny, adapter, tmp_path):
    """Early versions of PEFT wrote torch files; this one holds float16 numbers."""
    folder, _ = adapter
    safe = folder / "adapter_model.safetensors"
    halves = {name: array.astype(np.float16) for name, array in load_file(safe).items()}
    save_file(halves, safe)
    expected = parameters(tiny, adapter=folder)
    safe.unlink()
    state = {name: torch.from_numpy(array).T.contiguous().T for name, array in halves.items()}
    checkpoints.write(state, folder / "adapter_model.bin", "zip")
    weights = parameters(tiny, adapter=folder)
    assert all(np.array_equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "options",
    [
        {"q_bits": 4, "q_group_size": 32},
        {"quant_predicate": "vo_4_5", "q_group_size": 32},
        {"q_mode": "mxfp8"},
        {"q_mode": "nvfp4"},
    ],
)
def test_a_quantized_weight_is_quantized_again_in_8_bits(tiny, tmp_path, options):
    """Each adapted layer is dequantized from its own bits; other layers do not change."""
    layers = {f"{name[:-1]}{part}": shape for name, shape in Q_LAYERS.items() for part in "qv"}
    targets = {"target_modules": ["q", "v"], "lora_alpha": 1}
    matrices = adapters.by_hand(tmp_path / "adapter", layers, **targets)
    out = convert(tiny, tmp_path / "out", quantize=True, **options)
    stored, paths = arrays(out), tensor_names(T5Config.from_dict(TINY))
    merged, _ = load(out, "float32", adapter=tmp_path / "adapter")
    entry = json.loads((out / "config.json").read_text())["quantization"]
    changed = {}
    for layer, (a, b) in matrices.items():
        path = paths[f"{layer}.weight"].removesuffix(".weight")
        own = entry.get(path, entry)
        how = {name: own[name] for name in ("group_size", "bits", "mode")}
        parts = [stored.get(f"{path}.{part}") for part in ("weight", "scales", "biases")]
        wide = [p if p is None or p.dtype != mx.bfloat16 else p.astype(mx.float32) for p in parts]
        weight = mx.dequantize(*wide, **how).astype(mx.float32) + mx.array(b * a)
        new = mx.quantize(weight, max(how["group_size"], 32), 8)
        names = (f"{path}.weight", f"{path}.scales", f"{path}.biases")
        changed |= dict(zip(names, new, strict=True))
    for name, array in tree_flatten(merged.parameters()):
        expected = changed[name] if name in changed else stored[name]
        assert mx.array_equal(array, expected.astype(array.dtype)), name


def test_merging_into_an_unquantized_mlx_folder_rounds_once(tiny, adapter, tmp_path):
    """The merged weights equal those of a float32 sum that is rounded once."""
    folder, matrices = adapter
    out = convert(tiny, tmp_path / "out", "bfloat16")
    name = tensor_names(T5Config.from_dict(TINY))[f"{Q}.weight"]
    a, b = matrices[Q]
    expected = arrays(out)[name].astype(mx.float32) + mx.array(2 * (b * a))
    for dtype in (mx.float32, mx.bfloat16):
        weight = dict(tree_flatten(load(out, dtype, adapter=folder)[0].parameters()))[name]
        assert mx.array_equal(weight, expected.astype(dtype))


# ---- refused -------------------------------------------------------------------------------------


A = f"{Q}.lora_A.weight"


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (A, None, f"incomplete: base_model.model.{A} is missing"),
        (A, (1, 63), r"lora_A.weight has shape \(1, 63\) instead of \(1, 64\)"),
        (A, (1, 64), "is int32; weights must be float32"),
        (f"{Q}.lora_magnitude_vector", (64,), "unexpected base_model.model.decoder"),
        ("shared.lora_embedding_A", (1, 40), "unexpected base_model.model.shared.lora_"),
        ("shared.weight", (40, 64), "unexpected base_model.model.shared.weight"),
    ],
)
def test_a_damaged_or_mismatched_adapter_is_refused(tiny, adapter, tmp_path, name, shape, message):
    """A tensor is removed or replaced, or a tensor that does not belong is added."""
    folder, _ = adapter
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors.pop(f"base_model.model.{name}", None)
    save_file(
        tensors | ({f"base_model.model.{name}": np.ones(shape, np.int32)} if shape else {}), file
    )
    for attempt in (
        lambda: load(tiny, adapter=folder),
        lambda: convert(tiny, tmp_path / "out", adapter_path=folder),
    ):
        with pytest.raises(UserError, match=message):
            attempt()
    assert checkpoints.siblings(tmp_path / "out") == {"source", "adapter"}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "flan"])
@pytest.mark.parametrize("layer", [*OTHERS, "encoder.embed_tokens"])
def test_peft_is_recommended_only_where_it_merges_what_was_trained(
    reference_of, tmp_path, family, layer
):
    """That is not so where places share a weight: the embedding, and an output head tied to it."""
    import peft

    reference, folder = reference_of(family), tmp_path / "lora"
    state = adapters.by_peft(reference.model, folder, target_modules=["q", layer])
    merged = copy.deepcopy(reference.model)
    merged.load_state_dict(state)
    adapted = peft.PeftModel.from_pretrained(copy.deepcopy(reference.model), folder)
    tokens = torch.tensor([[5, 9, 1]])
    with torch.no_grad():
        one, other = (m(input_ids=tokens, labels=tokens).logits for m in (adapted, merged))
    equal = torch.allclose(one, other, atol=1e-3)
    advice = "cannot be merged here; merge it with PEFT" if equal else "even by PEFT: .*; train"
    with pytest.raises(UserError, match=f"LoRA on .*{advice}"):
        load(reference.folder, adapter=folder)
    assert equal == (layer == "relative_attention_bias" or (layer, family) == ("lm_head", "flan"))


@pytest.mark.parametrize("name", ["", "nowhere", "source/config.json"])
def test_a_missing_adapter_folder_is_refused(tiny, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"there is no adapter folder '{name}'"):
        load(tiny, adapter=name)
