"""Compiled layers compute what plain layers compute; every parameter may be replaced."""

import math
import os
import sys

import numpy as np
import pytest

from mlx_t5.backend import cpu_only, mx, nn, tree_flatten
from mlx_t5.checkpoints.config import T5Config
from mlx_t5.checkpoints.quantization import quantize_predicate
from mlx_t5.errors import UserError
from mlx_t5.model import T5
from mlx_t5.network import compiled as layers
from mlx_t5.network import linear
from random_models import CONFIG, V, random_t5, randomize

FAMILIES = {
    "t5": {"feed_forward_proj": "relu", "num_heads": 3},
    "v1.1": {"feed_forward_proj": "gated-gelu"},
    "ul2": {"feed_forward_proj": "gated-silu"},
    "umt5": {"model_type": "umt5", "feed_forward_proj": "gated-gelu"},
}


cpu_forms = pytest.mark.skipif(not cpu_only(), reason="GPUs compile without a C++ compiler")


def random_model(family, kind, separate_head=False):
    """Returns a random model of a family in a type, or quantized."""
    model = T5(T5Config.from_dict(CONFIG | FAMILIES[family]), separate_head)
    dtype = getattr(mx, kind, mx.float32)
    randomize(model, mx.random.split(mx.random.key(3), 200), 0.0, dtype)
    if "bits" in kind:
        bits = {"4 bits": (4, 4), "8 bits": (8, 8), "mixed bits": (4, 8)}[kind]

        def quantized(path, layer):
            """With mixed bits, values differ from queries and keys and are not joined with them."""
            if not quantize_predicate(path, layer):
                return False
            return {"group_size": 32, "bits": bits[path.endswith((".v", ".wi_1"))]}

        nn.quantize(model, class_predicate=quantized)
    model.join()
    return model


def cache_of(model, rows, source=8):
    """Returns a cache of `rows` rows; all sources but the first are padded."""
    ids = mx.arange(rows * source).reshape(rows, source) % (V - 3) + 3
    mask = (mx.arange(source) < source - mx.arange(rows)[:, None]) if rows > 1 else None
    return model.cache(model.encode(ids, mask), mask)


@pytest.fixture
def decoded(monkeypatch):
    """Returns a function that runs passes, compiled or plain: their logits and the final cache."""

    def decoded(model, rows, compiled):
        monkeypatch.setattr(layers, "passes_before_compiling", lambda: 0 if compiled else math.inf)
        cache, at, logits = cache_of(model, rows), [0, 2, 5][:rows], []
        for length in (1, 5, 5, 1, 3, 5, 5, 2):
            tokens = mx.random.randint(0, V, (len(at), length), key=mx.random.key(len(logits)))
            logits.append(model.decode(tokens, cache, at))
            mx.eval(logits[-1], cache.state)
            at = [place + length - (row + len(logits)) % 2 for row, place in enumerate(at)]
            if len(logits) == 4 and rows > 1:  # one row leaves and another joins
                cache.filter([2, 0])
                cache.extend(cache_of(model, 1, source=11))
                at = [at[2], at[0], 0]
        return logits, cache.state

    return decoded


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("t5", "float32"),
        ("v1.1", "bfloat16"),
        ("ul2", "float16"),
        ("umt5", "4 bits"),
        ("t5", "8 bits"),
        ("v1.1", "mixed bits"),
    ],
)
def test_compiled_layers_equal_plain_ones(decoded, family, kind):
    """Passes of several lengths over ragged rows; the cache grows, loses a row and gains one.

    Results are equal to the bit, except on a Mac, where compilers may fuse products and sums.
    """
    off = {"float32": 1e-4}.get(kind, 0.05) if sys.platform == "darwin" else 0
    model = random_model(family, kind)
    for rows in (1, 3):
        (plain, plain_state), (other, other_state) = (
            decoded(model, rows, compiled) for compiled in (False, True)
        )
        for a, b in zip(plain + plain_state, other + other_state, strict=True):
            a, b = (np.array(x.astype(mx.float32)) for x in (a, b))
            np.testing.assert_allclose(a, b, rtol=0, atol=off * max(np.abs(b).max(), 1))


@cpu_forms
def test_products_in_other_forms_are_compiled_too(decoded, monkeypatch):
    """As are those of large weights with some kinds of BLAS."""
    forms = (range(1, 4), linear.weight_first), (range(4, 99), linear.as_written)
    monkeypatch.setattr(linear, "faster_forms", lambda *_: forms)
    model = random_model("t5", "float32")
    assert model.decoder.arrays[0][0][0].output.forms
    for rows in (1, 3):
        (logits, _), (expected, _) = (decoded(model, rows, c) for c in (True, False))
        assert all(mx.allclose(a, b, atol=1e-5) for a, b in zip(logits, expected, strict=True))


def test_compiled_layers_use_replaced_weights(monkeypatch):
    monkeypatch.setattr(layers, "passes_before_compiling", lambda: 0)
    model = random_t5()
    cache = cache_of(model, 1)
    before = model.decode(mx.array([[5]]), cache, [0])
    wo = model.decoder.layers[0].feed_forward.wo.weight
    model.load_weights([("decoder.layers.0.feed_forward.wo.weight", 2 * wo)], strict=False)
    changed = model.decode(mx.array([[5]]), cache, [0])
    assert not mx.array_equal(before, changed)
    nn.quantize(model, group_size=32, bits=4, class_predicate=quantize_predicate)
    assert not mx.array_equal(changed, model.decode(mx.array([[5]]), cache, [0]))


@pytest.fixture
def own_folder(monkeypatch, tmp_path):
    """A temporary folder of the test's own, where a CPU's layers are to be compiled."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("T5_COMPILE", "1")
    for cached in (layers.passes_before_compiling, layers.failures, layers._compiled):
        cached.cache_clear()
    yield tmp_path
    for cached in (layers.passes_before_compiling, layers.failures, layers._compiled):
        cached.cache_clear()


@cpu_forms
def test_a_failing_compiler_harms_no_text(own_folder, monkeypatch, capfd):
    """The full disk appears in the middle of a text: its next tokens are those of plain layers."""
    # An epsilon of its own, so that this process has no kernel for it.
    model = T5(T5Config.from_dict(CONFIG | {"layer_norm_epsilon": 3.25e-5}))
    randomize(model, mx.random.split(mx.random.key(3), 200), 0.0, mx.float32)
    compiler = own_folder / "g++"
    compiler.write_text("#!/bin/sh\necho No space left on device >&2\nexit 1\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("PATH", str(own_folder), prepend=os.pathsep)
    results = []
    for passes in (-99, -1):  # compiled never, or from the second pass on
        cache, model.decoder_passes = cache_of(model, 1), passes
        logits = [model.decode(mx.array([[i]]), cache, [i]) for i in range(3)]
        mx.eval(logits, cache.state)
        results.append(logits + cache.state)
    assert all(map(mx.array_equal, *results))
    assert capfd.readouterr().err.count("note: layers are not compiled: ") == 1


@cpu_forms
def test_layers_are_compiled_only_where_nobody_else_can_write(own_folder, monkeypatch, capfd):
    """MLX loads any library that lies in the folder of its kernels."""
    assert layers.passes_before_compiling() == 0
    folder = own_folder / "mlx" / mx.__version__ / "cpu"
    assert folder.is_dir() and not folder.stat().st_mode & 0o077
    for path, change, reason in (
        (folder, lambda: folder.chmod(0o722), "others may write to "),
        (folder.parent, lambda: folder.parent.chmod(0o770), "others may write to "),
        (own_folder, lambda: monkeypatch.setenv("TMPDIR", "/proc/self"), "No such file"),
        (own_folder, lambda: monkeypatch.setenv("PATH", ""), "there is no g++"),
    ):
        change()
        layers.passes_before_compiling.cache_clear()
        assert layers.passes_before_compiling() == math.inf
        assert reason in capfd.readouterr().err
        path.chmod(0o700)
        monkeypatch.setenv("TMPDIR", str(own_folder))
    monkeypatch.setenv("T5_COMPILE", "0")
    layers.passes_before_compiling.cache_clear()
    assert layers.passes_before_compiling() == math.inf and not capfd.readouterr().err
    monkeypatch.setenv("T5_COMPILE", "yes")
    layers.passes_before_compiling.cache_clear()
    with pytest.raises(UserError, match="T5_COMPILE must be 0 or 1, not yes"):
        layers.passes_before_compiling()


def assign(part, name, value):
    """Assigns a parameter or a module by its name, as in `model.decoder.norm.weight = value`."""
    *path, last = name.split(".")
    for step in path:
        part = part[int(step)] if step.isdigit() else getattr(part, step)
    if isinstance(part, list):
        part[int(last)] = value
    else:
        setattr(part, last, value)


@pytest.mark.parametrize(
    ("family", "kind"), [("t5", "float32"), ("umt5", "float16"), ("v1.1", "4 bits")]
)
def test_an_assigned_parameter_acts_in_the_next_pass(family, kind):
    """After each assignment the model equals one that has got the same arrays by `update`."""
    model, other = (random_model(family, kind, separate_head=True) for _ in range(2))

    def logits(model):
        return np.array(model(mx.arange(3, 12)[None], mx.arange(9)[None]))

    before = logits(model)
    for i, (name, array) in enumerate(tree_flatten(model.parameters())):
        if mx.issubdtype(array.dtype, mx.floating):
            change = mx.abs(array).max() * mx.random.normal(array.shape, key=mx.random.key(i))
            assign(model, name, array + change.astype(array.dtype))
        else:  # the packed integers of quantized weights
            assign(model, name, array ^ 0x11111111)
        after = logits(model)
        other.update(model.parameters())
        assign(model, name, array)
        off = (0.01 if kind == "float16" else 1e-4) * np.abs(after).max()
        np.testing.assert_allclose(after, logits(other), rtol=0, atol=off, err_msg=name)
        assert np.abs(after - before).max() > 5 * off, name


@pytest.mark.parametrize(
    "name", ["layers.0.feed_forward.wo", "layers.1.cross_attention", "layers.0"]
)
def test_an_assigned_module_acts_in_the_next_pass(name):
    model, other = random_t5(), random_t5(seed=1)
    cache = cache_of(model, 1)
    before = model.decode(mx.array([[5]]), cache, [0])
    assign(model.decoder, name, dict(other.decoder.named_modules())[name])
    after = model.decode(mx.array([[5]]), cache, [0])
    assert not mx.array_equal(before, after)
    model.update({})
    assert mx.array_equal(after, model.decode(mx.array([[5]]), cache, [0]))
