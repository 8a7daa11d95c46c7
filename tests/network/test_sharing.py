"""Tests sharing.py: drafts made of a target's decoder, and how their target is recognized."""

import json

import numpy as np
import pytest

from devices import cpu_allocation
from families import Family
from mlx_t5.backend import mx, tree_flatten
from mlx_t5.checkpoints.checkpoint import ENTRY
from mlx_t5.convert import convert
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.drafting.draft_model import DraftModel
from mlx_t5.drafting.source_copy import SourceCopy
from mlx_t5.errors import UserError
from mlx_t5.model import load
from mlx_t5.network.draft_vocabulary import narrow
from mlx_t5.network.sharing import shared_draft
from mlx_t5.network.sizes import folder_bytes
from mlx_t5.training.draft_folder import save_draft
from random_models import random_t5

IDS = mx.array([[5, 9, 3, 1], [40, 41, 42, 1]])
WRITTEN = mx.array([[0, 7, 8], [0, 20, 21]])
PROMPTS = [[7, 8, 9, 1], [30, 31, 1], [*range(20, 45), 1], [5, 1], [50, 2, 50, 2, 50, 1], [7, 8, 1]]
# Tied; gated with a separate head; a bias in every layer; few decoder layers.
KINDS = ("t5", "flan", "umt5", "byt5", "quantized")


@pytest.fixture(scope="module")
def folders(reference_of, tmp_path_factory):
    """Returns `folders(kind)`: a target's folder; "quantized" includes embedding and head."""
    root = tmp_path_factory.mktemp("targets")
    in_bits = {"quantize": True, "q_group_size": 32, "quant_predicate": "embed_8"}

    def folder(kind):
        if kind != "quantized":
            return reference_of(kind).folder
        path = root / kind
        return (
            path
            if path.exists()
            else convert(reference_of("flan").folder, path, "float32", **in_bits)
        )

    return folder


def held(model):
    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_of_all_layers_equals_the_target_and_holds_its_decoder(folders, kind, tmp_path):
    target, _ = load(folders(kind), "float32")
    depth = target.config.num_decoder_layers
    expected = target(IDS, WRITTEN)
    full_draft = shared_draft(target, depth)
    alone = save_draft(full_draft, folders(kind), tmp_path / "draft")
    whole = save_draft(full_draft, folders(kind), tmp_path / "whole", standalone=True)
    assert ENTRY not in json.loads((whole / "config.json").read_text())
    loaded = load(alone, shared_with=target)[0]
    for draft in (full_draft, loaded):
        assert all(name.startswith("decoder.") for name, _ in tree_flatten(draft.parameters()))
        assert draft.trainable_parameters().keys() == {"decoder"}
        for part in ("encoder", "shared", "lm_head"):
            assert getattr(draft, part, None) is getattr(target, part, None)
    assert folder_bytes(alone, "float32") == held(loaded)
    for draft in (full_draft, loaded, load(whole)[0]):
        assert mx.allclose(draft(IDS, WRITTEN), expected, atol=1e-4, rtol=1e-4)


def test_layers_are_taken_evenly_from_the_first_on(reference_of):
    family = Family("deep", {"model_type": "umt5", "num_layers": 4})  # each has a separate bias
    target, _ = load(reference_of(family).folder, "float32")
    draft = shared_draft(target, 2)
    for i, place in enumerate((0, 2)):
        copy, source = draft.decoder, target.decoder
        for name, array in tree_flatten(copy.layers[i].parameters()):
            weights = dict(tree_flatten(source.layers[place].parameters()))
            assert mx.array_equal(array, weights[name])
        tables = (stack.relative_attention_bias[at] for stack, at in ((copy, i), (source, place)))
        assert mx.array_equal(*(table.weight for table in tables))
    for layers in (0, 5):
        with pytest.raises(UserError, match="the target has 4; choose 1 to 4"):
            shared_draft(target, layers)


@cpu_allocation
def test_shared_weights_are_held_once(reference_of, tmp_path):
    target, _ = load(reference_of("flan").folder, "float32")
    path = save_draft(shared_draft(target, 1), reference_of("flan").folder, tmp_path / "draft")
    before, weight = mx.get_active_memory(), target.encoder.layers[0].self_attention.q.weight
    draft, _ = load(path, shared_with=target)
    assert 0 < mx.get_active_memory() - before < 1.1 * held(draft)
    assert target.encoder.layers[0].self_attention.q.weight is weight, "joined once more"


def decoders(target, draft, **options):
    model = DraftModel(draft, target)
    yield SpeculativeDecoder(target, model, None, 3, **options)
    yield SpeculativeDecoder(target, model, None, 7, copy=SourceCopy(), **options)


def narrowed(target):
    """Returns a draft that proposes only odd tokens."""
    draft = shared_draft(target, 1)
    narrow(draft, np.arange(1, target.config.vocab_size, 2))
    return draft


@pytest.mark.parametrize("mode", ["float32", "4 bit", "own vocabulary"])
def test_texts_are_those_of_the_target(mode):
    target = random_t5("4 bit" if mode == "4 bit" else "float32", seed=3)
    draft = narrowed(target) if mode == "own vocabulary" else shared_draft(target, 1)
    regular = [r.tokens for r in SpeculativeDecoder(target).generate(PROMPTS, 20)]
    accepted = 0
    for decoder in decoders(target, draft):
        results = decoder.generate(PROMPTS, 20, batch_size=4)  # two rows join while others run
        assert [r.tokens for r in results] == regular
        accepted += sum(r.origins.count("draft") for r in results)
    assert accepted > 20, "else the drafts were never right, and little is shown"


def test_a_draft_is_refused_with_a_target_of_another_shape(tmp_path, reference_of):
    target, other = random_t5(seed=3), random_t5(seed=4)
    draft = shared_draft(target, 1)
    with pytest.raises(UserError, match="uses the encoder of another target"):
        SpeculativeDecoder(other, draft)
    folder = reference_of("t5").folder
    path = save_draft(shared_draft(load(folder)[0], 1), folder, tmp_path / "draft")
    for options, match in (
        ({}, "is a draft for t5 and uses its encoder: give it as --draft-model"),
        ({"shared_with": other}, "is a draft for t5, and the target has another shape"),
        ({"shared_with": load(folder)[0], "adapter": tmp_path}, "merge the adapter into that"),
    ):
        with pytest.raises(UserError, match=match):
            load(path, **options)


@pytest.mark.parametrize(
    "field", ["vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads"]
)
def test_each_size_that_both_must_have_is_compared(tmp_path, reference_of, field):
    target, _ = load(reference_of("t5").folder)
    path = save_draft(shared_draft(target, 1), reference_of("t5").folder, tmp_path / "draft")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {field: config[field] + 1}))
    with pytest.raises(UserError, match="the target has another shape"):
        load(path, shared_with=target)


@pytest.mark.parametrize("name", ["t5", "me/other"])
def test_a_target_of_another_name_gets_a_note(reference_of, tmp_path, capsys, name):
    """Its text stays right, as every proposal is verified."""
    target, _ = load(reference_of("t5").folder)
    path = save_draft(shared_draft(target, 1), reference_of("t5").folder, tmp_path / "draft")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, ENTRY: {"model": name}}))
    assert load(path, shared_with=target)[0].shares_with is target
    noted = "and the target is t5: the text stays right, but" in capsys.readouterr().err
    assert noted == (name != "t5")
