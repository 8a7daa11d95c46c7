"""Each rank reads only its part of every weight, in every format."""

import math

import pytest
import torch

import adapters
import checkpoints
import shared_models
from fake_metal import FakeMetal
from mlx_t5 import loading
from mlx_t5.backend import mx, tree_flatten
from mlx_t5.checkpoints.stored_tensor import StoredTensor
from mlx_t5.errors import UserError
from mlx_t5.loading import ModelPair, load_pair
from mlx_t5.network import memory
from mlx_t5.network.config import T5Config
from mlx_t5.network.memory import SLACK, folder_bytes, warning
from mlx_t5.network.ranks import Ranks
from mlx_t5.network.sharding import require_divisible
from mlx_t5.network.sharing import full_head
from mlx_t5.network.weights import HEAD
from mlx_t5.sizes import readable
from model import load


class Group:
    """A rank in a group without other ranks: it can load a model but not compute."""

    def __init__(self, rank, size):
        self._numbers = rank, size

    def rank(self):
        return self._numbers[0]

    def size(self):
        return self._numbers[1]


def parts(folder, size=2, **how):
    """Returns the parameters of every rank."""
    models = [load(folder, "float32", group=Group(r, size), **how)[0] for r in range(size)]
    assert all(model.passes == -math.inf for model in models)
    return [dict(tree_flatten(model.parameters())) for model in models]


def assert_whole(shards, folder, **how):
    """Asserts that the joined parts are the whole model."""
    for name, whole in tree_flatten(load(folder, "float32", **how)[0].parameters()):
        own = [part[name] for part in shards]
        if own[0].shape == whole.shape:
            assert all(mx.array_equal(array, whole) for array in own), name
            continue
        axis = 0 if sum(len(array) for array in own) == len(whole) else 1
        assert mx.array_equal(mx.concatenate(own, axis=axis), whole), name


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("sharding") / "models"
    root.mkdir()
    shared_models.make(root)
    return root


@pytest.mark.parametrize("format", checkpoints.FORMATS)
def test_parts_of_a_hugging_face_folder_make_the_whole(tmp_path, format):
    state = checkpoints.random_state(checkpoints.TINY)
    state[HEAD] = torch.rand(40, 64)
    folder = checkpoints.save(state, tmp_path / format, format, config=checkpoints.TINY)
    assert_whole(parts(folder, size=4), folder)
    part, whole = load(folder, "float32", group=Group(3, 4))[0], load(folder, "float32")[0]
    assert part.lm_head.weight.shape == (10, 64)
    assert mx.array_equal(full_head(part).weight, whole.lm_head.weight)


def test_an_adapter_is_merged_before_the_cut(root, tmp_path):
    width = shared_models.SHAPE["d_model"]
    layers = [f"{stack}.block.0.layer.0.SelfAttention" for stack in ("encoder", "decoder")]
    shapes = {f"{layer}.q": (128, width) for layer in layers}
    shapes |= {f"{layer}.o": (width, 128) for layer in layers}
    shapes |= {"decoder.block.0.layer.1.EncDecAttention." + k: v for k, v in
               (("q", (128, width)), ("o", (width, 128)))}  # fmt: skip
    adapters.by_hand(tmp_path, shapes, target_modules=["q", "o"])
    for name in ("gated", "quantized"):
        shards = parts(root / name, adapter=tmp_path)
        assert_whole(shards, root / name, adapter=tmp_path)


IDS, WRITTEN = mx.array([[5, 9, 3, 1]]), mx.array([[0, 7, 8]])


@pytest.mark.parametrize("name", ["gated", "tied", "quantized", "tied-quantized"])
def test_a_draft_on_a_part_of_a_target_has_the_same_bits_and_asks_no_rank(root, name):
    whole = load(root / name, "float32")[0]
    states = whole.encode(IDS)
    expected = load(root / f"{name}-draft", shared_with=whole)[0]
    for rank in (0, 1):
        part = load(root / name, "float32", group=Group(rank, 2))[0]
        # With this group every collective fails, as the encoder of a part does.
        draft = load(root / f"{name}-draft", shared_with=part)[0]
        logits = [
            model.decode(WRITTEN, model.cache(states, capacity=3), [0])
            for model in (draft, expected)
        ]
        assert mx.array_equal(*logits)
        assert draft.shared.weight is part.shared.weight
        with pytest.raises(TypeError):  # the target's encoder needs the missing rank
            draft.encode(IDS)


def test_drafts_on_a_part_of_a_target_are_checked_as_on_the_whole(root):
    part = load(root / "gated", "float32", group=Group(0, 2))[0]
    draft = root / "gated-draft"
    for folder, how, match in (
        (root / "tied-draft", {"shared_with": part}, "and the target is another model"),
        (draft, {"group": Group(0, 2)}, "is a draft for gated and works with that alone"),
        (draft, {"shared_with": part, "group": Group(0, 2)}, "load it without a group"),
    ):
        with pytest.raises(UserError, match=match):
            load(folder, **how)


@pytest.mark.parametrize("name", ["gated", "tied", "quantized"])
def test_the_memory_of_a_whole_head_counts(root, name, monkeypatch):
    part = load(root / name, "float32", group=Group(0, 2))[0]
    metal = FakeMetal(monkeypatch, recommended=10**12)
    head = full_head(part)
    held = sum(array.nbytes for array in head.parameters().values()) if head else 0
    assert metal.limits[:1] == ([held + SLACK] if head else [])
    monkeypatch.setattr(memory, "limit", lambda: 0)
    folders = [root / name, root / f"{name}-draft"]
    target, draft = (folder_bytes(folder, "float32") for folder in folders)
    needed = target // 2 + draft + held
    assert f"take {readable(needed)}, " in warning(folders, "float32", 2, whole_head=True)
    assert f"take {readable(needed - held)}, " in warning(folders, "float32", 2)


@pytest.mark.parametrize(
    ("size", "draft", "whole"),
    [(1, "gated-draft", False), (2, "gated-draft", True), (2, "draft", False)],
)
def test_a_pair_is_loaded_with_a_whole_head_where_the_draft_needs_one(
    root, monkeypatch, size, draft, whole
):
    calls = []
    monkeypatch.setattr(loading, "warning", lambda *args: calls.append(args))
    folders = [root / "gated", root / draft]
    group = Group(0, size) if size > 1 else None
    target, drafter, *_ = load_pair(ModelPair(*folders, False, ""), "float32", group)
    assert calls == [(folders, "float32", size, whole)]
    assert drafter.model.shares_with is (target if draft == "gated-draft" else None)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["gated", "tied", "quantized"])
def test_a_rank_reads_and_holds_its_share_and_the_common_weights(root, monkeypatch, name, size):
    byte_counts, original = [], StoredTensor._read_into
    monkeypatch.setattr(
        StoredTensor, "_read_into", lambda *a: (byte_counts.append(a[1].nbytes), original(*a))[1]
    )
    held = [{n: array.nbytes for n, array in part.items()} for part in parts(root / name, size)]
    bytes_read, whole = sum(byte_counts), load(root / name, "float32")[0]
    sizes = {n: array.nbytes for n, array in tree_flatten(whole.parameters())}
    common = sum(n for key, n in sizes.items() if key.startswith("shared.") or "norm." in key)
    head = sum(n for key, n in sizes.items() if key.startswith("lm_head."))
    layers = (sum(sizes.values()) - common - head) // size
    rows = [Ranks(Group(rank, size)).share(shared_models.V) for rank in range(size)]
    heads = [head * (own.stop - own.start) // shared_models.V for own in rows]
    assert [sum(own.values()) for own in held] == [common + layers + own for own in heads]
    assert bytes_read == size * (common + layers) + head


def test_indivisible_models_are_refused_with_the_possible_numbers(root):
    with pytest.raises(UserError, match="3 ranks cannot share this model: 4 heads and 128 hidden"):
        load(root / "gated", group=Group(0, 3))
    config = T5Config.from_dict({**shared_models.SHAPE, "num_heads": 12, "d_ff": 1024})
    with pytest.raises(UserError, match="3 ranks .*: 1024 hidden units do not .* take 1, 2 or 4$"):
        require_divisible(config, Ranks(Group(0, 3)))
    with pytest.raises(UserError, match="2 ranks .*: 3 groups of quantized inputs .* take 1$"):
        require_divisible(config, Ranks(Group(0, 2)), {"a.o.scales": (9, 6), "a.wo.scales": (9, 3)})
    require_divisible(config, Ranks(Group(0, 4)), {"a.o.scales": (9, 8), "a.q.scales": (9, 3)})


def test_shares_are_equal_but_for_the_last():
    shares = [Ranks(Group(rank, 4)).share(61) for rank in range(4)]
    assert [share.stop - share.start for share in shares] == [16, 16, 16, 13]
