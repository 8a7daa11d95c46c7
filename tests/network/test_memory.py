"""Tests the formulas of memory against the bytes that MLX holds."""

import pytest

from devices import cpu_allocation
from fake_metal import FakeMetal
from mlx_t5.backend import device_memory as memory
from mlx_t5.backend import mx, nn, tree_flatten
from mlx_t5.checkpoints.config import T5Config
from mlx_t5.convert import convert
from mlx_t5.decoder import Engine
from mlx_t5.disk import BUNDLED
from mlx_t5.engine.rows import Row
from mlx_t5.engine.scheduler import decode_rows
from mlx_t5.model import T5, load
from mlx_t5.network.cache import source_width
from mlx_t5.network.sizes import cache_bytes, encoder_bytes, folder_bytes, warning
from mlx_t5.settings import Settings

TINY = {"vocab_size": 32, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 3}


def held(arrays):
    return sum(array.nbytes for array in arrays)


def model(dtype=mx.float32, **shape):
    t5 = T5(T5Config(**{**TINY, **shape}))
    t5.set_dtype(dtype)
    return t5


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(("rows", "source", "target"), [(1, 5, 1), (3, 40, 100)])
def test_caches_take_what_the_formula_says(dtype, rows, source, target):
    one = model(dtype, num_decoder_layers=3)
    cache = one.cache(one.encode(mx.zeros((rows, source), mx.int32)), capacity=target)
    assert held(cache.state) == cache_bytes(one.config, dtype.size, rows, source, target)


@cpu_allocation
@pytest.mark.parametrize("feed_forward", ["relu", "gated-gelu"])
def test_an_encoder_takes_about_the_estimated_memory(feed_forward):
    sizes = {"d_model": 256, "d_kv": 64, "num_heads": 4, "d_ff": 1024}
    one = model(**sizes, feed_forward_proj=feed_forward)
    mx.eval(one.parameters())
    for rows, source in ((1, 600), (4, 300), (8, 64)):
        ids = mx.zeros((rows, source), mx.int32)
        mx.eval(ids)
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(one.encode(ids))
        peak = mx.get_peak_memory() - before
        assert 0.8 * peak <= encoder_bytes(one.config, 4, rows, source) <= 2 * peak


@pytest.mark.slow
def test_the_formula_counts_plain_and_quantized_weights(tmp_path):
    source = BUNDLED / "target"
    loaded, _ = load(source, "float32")
    weights = held(a for _, a in tree_flatten(loaded.parameters()))
    assert folder_bytes(source, "float32") == 2 * folder_bytes(source, "bfloat16") == weights
    for name, options in {
        "4": {"q_bits": 4, "q_group_size": 32},
        "nvfp4": {"q_mode": "nvfp4"},
        "mixed": {"quant_predicate": "vo_4_5"},
        "embedding": {"q_bits": 8, "quant_predicate": "embed_8"},
    }.items():
        convert(source, tmp_path / name, quantize=True, **options)
        quantized, _ = load(tmp_path / name, "bfloat16")
        weights = held(a for _, a in tree_flatten(quantized.parameters()))
        assert folder_bytes(tmp_path / name, "bfloat16") == weights


def test_a_pass_reads_all_weights_of_the_decoder_once():
    one = model(num_decoder_layers=3, num_heads=4)
    attention = 4 * 64 * 64
    # Self-attention, q and o of cross-attention, the feed-forward, and three norms.
    layer = attention + attention // 2 + 2 * 64 * 96 + 3 * 64
    # A pass reads a separate head, but only looks up a few rows of the embedding.
    for t5 in (one, T5(one.config, separate_head=True)):
        assert t5.weights_read().bytes == 4 * (3 * layer + 32 * 64)
    nn.quantize(one, 32, class_predicate=lambda _, module: isinstance(module, nn.Linear))
    assert one.weights_read().bytes < 4 * 3 * layer / 4


def test_models_that_do_not_fit_give_a_warning(monkeypatch):
    folders = [BUNDLED / "target", BUNDLED / "draft"]
    monkeypatch.setattr(memory, "limit", lambda: 20_000_000)
    monkeypatch.setattr(memory, "device_info", lambda: {"device_name": "a CPU"})
    assert warning(folders[1:], "float32") is None
    assert "27.7 MB, and there are 20.0 MB of memory" in warning(folders, "float32")


@pytest.mark.parametrize("memory, curable", [(10**9, True), (33_000_000, False)])
def test_a_mac_is_warned_near_what_macos_recommends(monkeypatch, memory, curable):
    folders = [BUNDLED / "target", BUNDLED / "draft"]  # 27.7 MB in float32
    FakeMetal(monkeypatch, recommended=31_000_000)
    assert warning(folders, "float32") is None  # 0.894 of the recommended memory
    FakeMetal(monkeypatch, recommended=30_500_000, memory=memory)  # 0.909
    message = warning(folders, "float32")
    assert "at most 30.5 MB" in message
    # Only as much as the whole machine can spare.
    assert ("sudo sysctl iogpu.wired_limit_mb=30" in message) == curable


def row(length, max_tokens=20):
    return Row([3] * length, Settings(max_tokens), mx.zeros(2))


def test_caches_are_wired_and_buffers_kept_as_far_as_memory_allows(monkeypatch):
    monkeypatch.setattr(memory, "cpu_only", lambda: False)
    metal = FakeMetal(monkeypatch, recommended=48 << 30)
    one = model()
    metal.active, metal.cached = 22 << 30, 300_000
    Engine(one, None).insert([row(10)])
    needed = one.cache_memory(1, source_width(10), 20) + one.encoder_memory(1, source_width(10))
    assert metal.limits == [metal.active + metal.cached + needed + memory.SLACK]
    assert metal.cache_limits == [((26 << 30) - needed) // 4]
    metal.active = 48 << 30  # no free memory
    memory.wire(needed)
    memory.keep_buffers(needed)
    assert metal.limits[1:] == [48 << 30], "nothing beyond what macOS recommends"
    assert metal.cache_limits[1:] == [memory.KEPT]


def test_rows_are_refused_before_they_fill_the_machine(monkeypatch):
    one = model()
    engine = Engine(one, None)
    engine.insert([row(10)])
    needed = one.cache_memory(2, source_width(10), 20) + one.encoder_memory(1, source_width(10))
    monkeypatch.setattr(mx, "get_active_memory", lambda: 0)
    for free, rejected in ((needed, row(100)), (needed, row(10, 2000)), (needed - 1, row(10))):
        monkeypatch.setattr(memory, "limit", lambda free=free: free)
        with pytest.raises(RuntimeError, match="needs .* MB, and .* MB are left"):
            engine.insert([rejected])
    assert len(engine.rows) == 1
    monkeypatch.setattr(memory, "limit", lambda: needed)
    engine.insert([row(10)])
    assert len(engine.rows) == 2


def test_the_memory_limit_is_that_of_the_device(monkeypatch):
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 5})
    assert memory.limit() == 5
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "a CPU"})
    assert 1e8 < memory.limit() < 1e14


@pytest.mark.parametrize(
    ("groups", "files", "limits"),
    [
        ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": "7", "memory.max": "9"}, (7, 9)),
        ("5:cpu:/\n4:memory:/b", {"memory/b/memory.limit_in_bytes": "5", "memory.max": "1"}, (5,)),
        ("4:memory:/of/the/host", {"memory/memory.limit_in_bytes": "6"}, (6,)),
        ("", {"memory.max": "1"}, ()),
    ],
)
def test_limits_of_a_container_and_its_parents_count(tmp_path, monkeypatch, groups, files, limits):
    (tmp_path / "cgroup").write_text(groups)
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{content}\n")
    assert memory.cgroup_limits(tmp_path / "cgroup", tmp_path) == limits
    monkeypatch.setattr(memory, "device_info", dict)
    monkeypatch.setattr(memory, "cgroup_limits", lambda: (3000, 2000))
    assert memory.limit() == 1800, "nine tenths, as of a machine's memory"


def test_max_tokens_is_lowered_to_what_memory_allows(monkeypatch, capsys):
    monkeypatch.setattr(memory, "limit", lambda: mx.get_active_memory() + 400_000)
    one = model()
    lowered, asked = [], [row(10, max_tokens) for max_tokens in (10**8, 10**8, 20)]
    for done in decode_rows(Engine(one, None), [asked], 2):
        assert done.error is None and done.decided > 0
        lowered.append(done.settings.max_tokens)
    assert lowered == [95, 95, 20]  # two caches of 96 slots fit into half of the memory
    (note,) = capsys.readouterr().err.splitlines()
    assert "lowered from 100000000 to 95" in note
