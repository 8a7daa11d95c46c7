"""Tests convert.py: the output has the same numbers, for every family, format and type."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import numpy as np
import pytest
import safetensors.torch
import torch
from transformers import AutoTokenizer

import adapters
import checkpoints
import families
from checkpoints import TINY, arrays, siblings
from command_line import ROOT
from convert import main
from devices import cpu_allocation
from mlx_t5.backend import mx, tree_flatten
from mlx_t5.checkpoints import writing
from mlx_t5.checkpoints.config import T5Config
from mlx_t5.checkpoints.names import tensor_names
from mlx_t5.convert import convert
from mlx_t5.disk import TOKENIZER_FILES
from mlx_t5.errors import UserError
from mlx_t5.model import load
from tokenizer_folders import TEXTS, write_class


def as_torch(array: mx.array) -> torch.Tensor:
    if array.dtype == mx.bfloat16:
        return torch.from_numpy(np.array(array.view(mx.uint16)).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def our_name(config: T5Config, name: str) -> str | None:
    """Returns this project's name of a Hugging Face tensor, None for a stray tensor."""
    return "shared.weight" if "embed_tokens" in name else tensor_names(config).get(name)


def test_every_family_is_converted(reference, tmp_path):
    """Each stored tensor arrives unchanged under the project's name, and no other appears."""
    out = convert(reference.folder, tmp_path / "out", dtype="float32")
    stored = safetensors.torch.load_file(reference.folder / "model.safetensors")
    config = load(reference.folder)[0].config
    converted = arrays(out)
    origins = {name: our_name(config, name) for name in stored}
    assert set(converted) <= set(origins.values())
    for name, tensor in stored.items():
        if origins[name] in converted:
            assert torch.equal(as_torch(converted[origins[name]]), tensor), name
        else:  # a tied head or a stray tensor, which is dropped
            assert name in ("lm_head.weight", families.STRAY)
    assert ("lm_head.weight" in converted) == reference.family.separate_head
    ids = mx.array([[5, 3, 9, 1]])
    before, after = (load(folder, "float32")[0](ids, ids) for folder in (reference.folder, out))
    assert mx.array_equal(before, after)


@pytest.mark.parametrize("format", checkpoints.FORMATS)
@pytest.mark.parametrize("stored", checkpoints.DTYPES)
@pytest.mark.parametrize("dtype", checkpoints.DTYPES)
def test_every_format_and_type_is_converted(tmp_path, format, stored, dtype):
    state = checkpoints.random_state(TINY, stored)
    checkpoints.save(state, tmp_path / "in", format, shards=2, config=TINY)
    converted = arrays(convert(tmp_path / "in", tmp_path / "out", dtype=dtype))
    config = load(tmp_path / "in")[0].config
    assert len(converted) == len(state)
    for name, tensor in state.items():
        mlx_name = our_name(config, name)
        is_float32 = dtype == "float16" and ".wo." in mlx_name
        expected = tensor.to(torch.float32 if is_float32 else getattr(torch, dtype))
        assert torch.equal(as_torch(converted[mlx_name]), expected), name


def test_transposed_and_shared_storages_are_converted(tmp_path):
    """Weights are views of one storage, and tied by value, by storage and under every name."""
    state = checkpoints.random_state(TINY)
    for name, tensor in state.items():
        if name.endswith(("q.weight", "wi.weight")):
            state[name] = tensor.T.contiguous().T
    both = torch.cat([state["shared.weight"], state["shared.weight"]])
    state |= {"shared.weight": both[:40], "encoder.embed_tokens.weight": both[:40]}
    state |= {"decoder.embed_tokens.weight": both[40:], "lm_head.weight": both[40:]}
    checkpoints.save(state, tmp_path / "in", "legacy", config=TINY)
    checkpoints.save(state, tmp_path / "plain", "safetensors", config=TINY)
    converted = arrays(convert(tmp_path / "in", tmp_path / "out", dtype="float32"))
    expected = arrays(convert(tmp_path / "plain", tmp_path / "out2", dtype="float32"))
    assert "lm_head.weight" not in converted and set(converted) == set(expected)
    assert all(mx.array_equal(converted[name], expected[name]) for name in expected)


def test_a_sharded_output_is_loaded(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "SHARD_BYTES", 100_000)
    out = convert(tiny, tmp_path / "out")
    assert len(list(out.glob("*.safetensors"))) > 2
    loaded, stored = dict(tree_flatten(load(out, "bfloat16")[0].parameters())), arrays(out)
    assert set(loaded) == set(stored)
    assert all(mx.array_equal(loaded[name], stored[name]) for name in stored)


def test_small_files_are_copied_beside_the_weights(tiny, tmp_path):
    for name in TOKENIZER_FILES:
        own = ROOT / "demo" / "target" / name
        (tiny / name).write_bytes(own.read_bytes() if own.exists() else b"{}")
    out = convert(tiny, tmp_path / "out", dtype="float16")
    assert {file.name for file in out.iterdir()} == {
        "config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "generation_config.json",
        *TOKENIZER_FILES,
    }
    assert all((out / name).read_bytes() == (tiny / name).read_bytes() for name in TOKENIZER_FILES)
    expected = {**TINY, "torch_dtype": "float16", "converted_from": {"folder": str(tiny)}}
    assert json.loads((out / "config.json").read_text()) == expected


def test_the_prefix_that_translates_is_kept(tiny, tmp_path):
    """Of the command line, or of an adapter, which has it in a file that PEFT ignores."""
    template = "translate {source} to {target}: "
    out = convert(tiny, tmp_path / "out", translation_prefix=template)
    assert load(out)[0].config.translation_prefix == template
    state = checkpoints.random_state(TINY)
    shapes = {n.removesuffix(".weight"): w.shape for n, w in state.items() if ".q." in n}
    adapters.by_hand(tmp_path / "lora", shapes, target_modules=["q"])
    assert not load(tiny, adapter=tmp_path / "lora")[0].config.translation_prefix
    entry = json.dumps({"translation_prefix": "{target}: "})
    (tmp_path / "lora" / "translation.json").write_text(entry)
    assert load(tiny, adapter=tmp_path / "lora")[0].config.translation_prefix == "{target}: "
    merged = convert(tiny, tmp_path / "merged", adapter_path=tmp_path / "lora")
    assert load(merged)[0].config.translation_prefix == "{target}: "
    with pytest.raises(UserError, match="a text with {target}"):
        convert(tiny, tmp_path / "bad", translation_prefix="translate: ")


def test_other_tokenizers_are_saved_as_tokenizer_json(tiny, tmp_path):
    config = (tiny / "config.json").read_text()
    write_class(tiny, "roberta")
    (tiny / "config.json").write_text(config)
    _, tokenizer = load(convert(tiny, tmp_path / "out"))
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert tokenizer(TEXTS).input_ids == AutoTokenizer.from_pretrained(tiny)(TEXTS).input_ids


def test_a_number_too_large_for_float16_is_refused(tiny, tmp_path):
    state = checkpoints.random_state(TINY)
    state["encoder.block.0.layer.1.DenseReluDense.wo.weight"][0, 0] = 1e5  # wo stays float32
    checkpoints.save(state, tiny, config=TINY)
    convert(tiny, tmp_path / "out", dtype="float16")
    state["encoder.block.0.layer.0.SelfAttention.q.weight"][0, 0] = 1e5
    checkpoints.save(state, tiny, config=TINY)
    with pytest.raises(
        UserError, match="self_attention.q.weight has numbers too large for float16"
    ):
        convert(tiny, tmp_path / "out2", dtype="float16")
    assert siblings(tmp_path / "out2") == {"source", "out"}


def test_an_unreadable_tensor_and_an_mlx_folder_are_refused(tiny, tmp_path):
    out = convert(tiny, tmp_path / "out")
    with pytest.raises(UserError, match="MLX folder already"):
        convert(out, tmp_path / "again")
    state = checkpoints.random_state(TINY) | {"shared.weight": torch.ones(40, 64).to(torch.int8)}
    checkpoints.save(state, tiny, config=TINY)
    with pytest.raises(UserError, match="shared.weight is int8; weights must be float32"):
        convert(tiny, tmp_path / "deep" / "out")
    assert siblings(out) == {"source", "out"}


def test_files_that_macos_leaves_in_folders_are_ignored(tiny, tmp_path):
    before = {file.name for file in convert(tiny, tmp_path / "out").iterdir()}
    for folder in (tiny, tmp_path / "out"):
        for name in (".DS_Store", "._config.json", "._model.safetensors"):
            (folder / name).write_bytes(b"\0\5\x16\7")
    out = convert(tiny, tmp_path / "out", overwrite=True)
    assert {file.name for file in out.iterdir()} == before


@pytest.mark.parametrize("quantize", [False, True])
def test_size_bits_and_peak_memory_are_told(tiny, tmp_path, capsys, quantize):
    for file in TOKENIZER_FILES:
        (tiny / file).unlink(missing_ok=True)
    path = convert(tiny, tmp_path / "out", quantize=quantize, q_group_size=32 if quantize else None)
    note, line = capsys.readouterr().err.splitlines()[-2:]
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    told, bits, peak = line.split(" · ")
    assert told == f"{size / 1e6:.1f} MB" and peak.startswith("peak memory ")
    bits = float(bits.removesuffix(" bits per weight"))
    assert 4.5 < bits < 16 if quantize else 16 <= bits < 17, "a file has a header, too"
    assert note.startswith(f"note: {tiny} has no tokenizer: add its files, or give token")


def test_the_command_line_converts_into_the_default_folder(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["--model", "source", "-q", "--q-bits", "8"]) == 0
    out = tmp_path / "models" / "source"
    assert capsys.readouterr().out == f"{out}\n"
    assert json.loads((out / "config.json").read_text())["quantization"]["bits"] == 8
    before = (out / "model.safetensors").read_bytes()
    assert main(["--model", "source/"]) == 2
    assert (out / "model.safetensors").read_bytes() == before
    assert capsys.readouterr().err.startswith(f"error: {out} exists; replace it with --overwrite")
    assert main(["--model", "source", "--overwrite", "--dtype", "float32"]) == 0
    assert arrays(out)["shared.weight"].dtype == mx.float32
    assert siblings(out) == {"source"}


PEAK = """
import mlx_t5.convert as convert, re, resource, sys
status = convert.main(sys.argv[1:]) if sys.argv[1:] else 0
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if sys.platform != "darwin":  # ru_maxrss starts at the parent's peak when it forked
    peak = 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
print(peak)
sys.exit(status)
"""


@functools.cache  # the imports are measured only once
def peak(*arguments: str) -> int:
    """Returns the peak of resident bytes of convert.py, or of its imports without arguments."""
    command = [sys.executable, "-c", PEAK, *arguments]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return int(output.split()[-1])


LARGE = {
    "model_type": "mt5", "vocab_size": 12_000, "d_model": 1024, "d_kv": 64, "d_ff": 2048,
    "num_layers": 9, "num_decoder_layers": 3, "num_heads": 16, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def large_state():
    return checkpoints.random_state(LARGE)


@pytest.mark.slow
@cpu_allocation
@pytest.mark.parametrize("format", checkpoints.FORMATS)
def test_peak_memory_does_not_grow_with_the_number_of_layers(tmp_path, format, large_state):
    """A checkpoint of 500 MB whose largest tensor has 49 MB needs a shard and a few tensors."""
    checkpoints.save(large_state, tmp_path / "in", format, config=LARGE)
    over = peak("--model", str(tmp_path / "in"), "--mlx-path", str(tmp_path / "out"), "-q") - peak()
    assert 10e6 < over < 330e6
