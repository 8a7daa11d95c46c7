"""Tests vectors against transformers' states, and encoders without a decoder."""

import copy
import json

import numpy as np
import pytest
import torch
import transformers

import adapters
from mlx_t5.backend import mx
from mlx_t5.convert import convert
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.errors import UserError
from mlx_t5.model import load

SOURCES = [[5, 9, 11, 30, 7, 1], [8, 1], [40, 41, 42, 43, 1], [1]]
ENCODERS = {"t5": transformers.T5EncoderModel, "umt5": transformers.UMT5EncoderModel}


def states(reference, source):
    """Returns transformers' encoder output (S, d_model) of one prompt."""
    return reference.encode([source])[0]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_vectors_are_means_over_the_tokens(reference_of, batch_size):
    reference = reference_of("umt5")
    decoder = SpeculativeDecoder(load(reference.folder)[0])
    means = np.stack([states(reference, source).mean(0) for source in SOURCES])
    vectors = decoder.embed(SOURCES, batch_size=batch_size)
    assert vectors.dtype == np.float32 and vectors.shape == means.shape
    np.testing.assert_allclose(vectors, means, atol=1e-4)
    lengths = np.linalg.norm(means, axis=1, keepdims=True)
    normal = decoder.embed(SOURCES, normalize=True, batch_size=batch_size)
    np.testing.assert_allclose(normal, means / lengths, atol=1e-4)


# ---- encoders alone ------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["t5", "umt5", "madlad"])
def encoder_folder(request, reference_of, tmp_path_factory):
    """Returns a family's model and the folder in which transformers saved its encoder."""
    reference = reference_of(request.param)
    folder = tmp_path_factory.mktemp("encoders") / request.param
    config = copy.deepcopy(reference.model.config)  # T5EncoderModel changes it
    alone = ENCODERS[reference.family.raw["model_type"]](config)
    alone.shared.load_state_dict(reference.model.shared.state_dict())
    alone.encoder.load_state_dict(reference.model.encoder.state_dict())
    alone.save_pretrained(folder)
    return reference, folder


@pytest.mark.parametrize("form", ["as saved", "converted", "quantized"])
def test_an_encoder_alone_loads_and_converts(encoder_folder, tmp_path, form):
    reference, folder = encoder_folder
    if form != "as saved":
        size = {"quantize": True, "q_bits": 8, "q_group_size": 32} if form == "quantized" else {}
        folder = convert(folder, tmp_path / "mlx", dtype="float32", **size)
        raw = json.loads((folder / "config.json").read_text())
        assert raw["architectures"] == [f"{raw['model_type'].upper()}EncoderModel"]
    model, _ = load(folder)
    assert not model.can_decode
    expected = states(reference, SOURCES[0])
    output = np.array(model.encode(mx.array([SOURCES[0]])))[0]
    assert np.abs(output - expected).max() < (0.1 if form == "quantized" else 1e-4) * expected.std()


@pytest.mark.slow
@pytest.mark.parametrize("encoder_folder", ["umt5"], indirect=True)
def test_adapters_of_encoders_and_of_whole_models_merge_into_an_encoder(encoder_folder, tmp_path):
    """They merge as in PEFT, at load and at conversion; weights for a decoder are skipped."""
    reference, folder = encoder_folder
    alone = type(reference.model).__name__.replace("ForConditionalGeneration", "EncoderModel")
    hf_encoder = getattr(transformers, alone).from_pretrained(folder)
    own = {"task_type": "FEATURE_EXTRACTION", "target_modules": ["q", "v", "wo"], "r": 3}
    merged = {"own": adapters.by_peft(hf_encoder, tmp_path / "own", **own)}
    merged["whole"] = adapters.by_peft(reference.model, tmp_path / "whole", target_modules=["q"])
    converted = convert(folder, tmp_path / "plain", "float32")
    for name, state in merged.items():
        adapter = tmp_path / name
        source = reference.folder if name == "whole" else folder
        out = convert(
            source, tmp_path / f"{name}-mlx", "float32", encoder_only=True, adapter_path=adapter
        )
        hf_encoder.encoder.load_state_dict(
            {n.removeprefix("encoder."): t for n, t in state.items() if n.startswith("encoder.")}
        )
        with torch.no_grad():
            expected = hf_encoder(torch.tensor([SOURCES[0]])).last_hidden_state[0].numpy()
        before = states(reference, SOURCES[0])
        assert np.abs(expected - before).max() > 1e-2, "the adapter changes something"
        for model in (load(folder, adapter=adapter), load(converted, adapter=adapter), load(out)):
            vectors = np.array(model[0].encode(mx.array([SOURCES[0]])))[0]
            np.testing.assert_allclose(vectors, expected, atol=1e-4 * expected.std())


@pytest.mark.parametrize("family", ["flan", "madlad"])
def test_convert_leaves_the_decoder_out_on_request(reference_of, tmp_path, family):
    reference = reference_of(family)
    folder = convert(reference.folder, tmp_path / "mlx", dtype="float32", encoder_only=True)
    model, _ = load(folder)
    assert not model.can_decode and "lm_head" not in model
    vectors = np.array(model.encode(mx.array([SOURCES[0]])))[0]
    np.testing.assert_allclose(vectors, states(reference, SOURCES[0]), atol=1e-4)


def test_a_whole_model_decodes_whatever_its_config_says_of_a_decoder(tiny):
    """transformers writes so after T5EncoderModel(model.config)."""
    expected = SpeculativeDecoder(load(tiny)[0]).generate([SOURCES[0]], max_tokens=5)
    path = tiny / "config.json"
    whole = json.loads(path.read_text())
    path.write_text(json.dumps(whole | {"is_encoder_decoder": False, "use_cache": False}))
    texts = SpeculativeDecoder(load(tiny)[0]).generate([SOURCES[0]], max_tokens=5)
    assert texts[0].tokens == expected[0].tokens != []


def test_an_encoder_alone_refuses_to_decode(reference_of, tmp_path):
    folder = convert(reference_of("t5").folder, tmp_path / "mlx", encoder_only=True)
    model, _ = load(folder)
    decoder = SpeculativeDecoder(model)
    message = "is an encoder alone: it makes embeddings and writes no text"
    for ask in (
        lambda: decoder.generate([5, 1]),
        lambda: next(decoder.stream([5, 1])),
        lambda: decoder.score([5, 1], [[5]]),
        lambda: model(mx.array([[5]]), mx.array([[0]])),
        lambda: SpeculativeDecoder(load(reference_of("t5").folder)[0], model),
    ):
        with pytest.raises(UserError, match=message):
            ask()
    assert decoder.embed([[5, 1]]).shape == (1, 32)
