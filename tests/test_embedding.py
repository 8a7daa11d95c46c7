"""Vectors against transformers' states, the folders of sentence-transformers, encoders alone."""

import json

import numpy as np
import pytest

import adapters
from command_line import byte_model
from convert import convert
from decoder import SpeculativeDecoder
from families import torch, transformers
from mlx_t5.backend import mx
from mlx_t5.checkpoints.sentence_modules import read_pooling
from mlx_t5.errors import UserError
from mlx_t5.network.pooling import ACTIVATIONS, MODES
from model import load

SOURCES = [[5, 9, 11, 30, 7, 1], [8, 1], [40, 41, 42, 43, 1], [1]]
ENCODERS = {
    "t5": transformers.T5EncoderModel,
    "mt5": transformers.MT5EncoderModel,
    "umt5": transformers.UMT5EncoderModel,
}


def states(reference, source):
    """transformers' encoder output (S, d_model) of one prompt."""
    return reference.encode([source])[0]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_vectors_are_means_over_the_tokens(reference, batch_size):
    decoder = SpeculativeDecoder(load(reference.folder)[0])
    means = np.stack([states(reference, source).mean(0) for source in SOURCES])
    found = decoder.embed(SOURCES, batch_size=batch_size)
    assert found.dtype == np.float32 and found.shape == means.shape
    np.testing.assert_allclose(found, means, atol=1e-4)
    lengths = np.linalg.norm(means, axis=1, keepdims=True)
    normal = decoder.embed(SOURCES, normalize=True, batch_size=batch_size)
    np.testing.assert_allclose(normal, means / lengths, atol=1e-4)


# ---- encoders alone ------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["t5", "flan", "mt5", "umt5", "madlad"])
def encoder_folder(request, made, tmp_path_factory):
    """What the encoder class of transformers saves of a family's model."""
    reference = made(request.param)
    folder = tmp_path_factory.mktemp("encoders") / request.param
    alone = ENCODERS[reference.family.raw["model_type"]](reference.model.config)
    alone.shared.load_state_dict(reference.model.shared.state_dict())
    alone.encoder.load_state_dict(reference.model.encoder.state_dict())
    alone.save_pretrained(folder)
    return reference, folder


@pytest.mark.parametrize("form", ["as saved", "converted", "quantised"])
def test_an_encoder_alone_loads_and_converts(encoder_folder, tmp_path, form):
    reference, folder = encoder_folder
    if form != "as saved":
        size = {"quantize": True, "q_bits": 8, "q_group_size": 32} if form == "quantised" else {}
        folder = convert(folder, tmp_path / "mlx", dtype="float32", **size)
        raw = json.loads((folder / "config.json").read_text())
        assert raw["architectures"] == [f"{raw['model_type'].upper()}EncoderModel"]
    model, _ = load(folder)
    assert not model.can_decode
    theirs = states(reference, SOURCES[0])
    ours = np.array(model.encode(mx.array([SOURCES[0]])))[0]
    assert np.abs(ours - theirs).max() < (0.1 if form == "quantised" else 1e-4) * theirs.std()


@pytest.mark.parametrize("encoder_folder", ["t5", "umt5"], indirect=True)
def test_adapters_of_encoders_and_of_whole_models_merge_into_an_encoder(encoder_folder, tmp_path):
    """As PEFT merges them: at load and at conversion, and what there is for a decoder is left."""
    reference, folder = encoder_folder
    alone = type(reference.model).__name__.replace("ForConditionalGeneration", "EncoderModel")
    theirs = getattr(transformers, alone).from_pretrained(folder)
    own = {"task_type": "FEATURE_EXTRACTION", "target_modules": ["q", "v", "wo"], "r": 3}
    merged = {"own": adapters.by_peft(theirs, tmp_path / "own", **own)}
    merged["whole"] = adapters.by_peft(reference.model, tmp_path / "whole", target_modules=["q"])
    converted = convert(folder, tmp_path / "plain", "float32")
    for name, state in merged.items():
        adapter = tmp_path / name
        source = reference.folder if name == "whole" else folder
        out = convert(
            source, tmp_path / f"{name}-mlx", "float32", encoder_only=True, adapter_path=adapter
        )
        theirs.encoder.load_state_dict(
            {n.removeprefix("encoder."): t for n, t in state.items() if n.startswith("encoder.")}
        )
        with torch.no_grad():
            expected = theirs(torch.tensor([SOURCES[0]])).last_hidden_state[0].numpy()
        before = states(reference, SOURCES[0])
        assert np.abs(expected - before).max() > 1e-2, "the adapter changes something"
        for model in (load(folder, adapter=adapter), load(converted, adapter=adapter), load(out)):
            ours = np.array(model[0].encode(mx.array([SOURCES[0]])))[0]
            np.testing.assert_allclose(ours, expected, atol=1e-4 * expected.std())


@pytest.mark.parametrize("family", ["flan", "madlad"])
def test_convert_leaves_the_decoder_out_on_request(made, tmp_path, family):
    reference = made(family)
    folder = convert(reference.folder, tmp_path / "mlx", dtype="float32", encoder_only=True)
    model, _ = load(folder)
    assert not model.can_decode and "lm_head" not in model
    ours = np.array(model.encode(mx.array([SOURCES[0]])))[0]
    np.testing.assert_allclose(ours, states(reference, SOURCES[0]), atol=1e-4)


def test_asked_to_decode_an_encoder_says_so_once(made, tmp_path):
    folder = convert(made("t5").folder, tmp_path / "mlx", encoder_only=True)
    model, _ = load(folder)
    decoder = SpeculativeDecoder(model)
    message = "is an encoder alone: it makes embeddings and writes no text"
    for ask in (
        lambda: decoder.generate([5, 1]),
        lambda: next(decoder.stream([5, 1])),
        lambda: decoder.score([5, 1], [[5]]),
        lambda: model(mx.array([[5]]), mx.array([[0]])),
        lambda: SpeculativeDecoder(load(made("t5").folder)[0], model),
    ):
        with pytest.raises(UserError, match=message):
            ask()
    assert decoder.embed([[5, 1]]).shape == (1, 32)


def test_the_command_line_embeds_with_an_encoder_and_refuses_to_decode(run, tmp_path):
    whole = byte_model(tmp_path / "whole")
    folder = str(convert(whole, tmp_path / "mlx", dtype="float32", encoder_only=True))
    status, out, err = run("--model", folder, "--embed", "--prompt", "abc", "--prompt", "é")
    records = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and [r["prompt"] for r in records] == ["abc", "é"]
    model, tokenizer = load(whole)
    vectors = SpeculativeDecoder(model, None, tokenizer).embed(["abc", "é"])
    np.testing.assert_allclose([r["embedding"] for r in records], vectors, rtol=1e-5, atol=1e-6)
    status, out, err = run("--model", folder, "--prompt", "abc")
    assert (status, out) == (2, "") and err.startswith("error: this model is an encoder alone")
    assert err.count("\n") == 1


# ---- folders of sentence-transformers ------------------------------------------------------------

NAMES = {"cls": "cls_token", "max": "max_tokens", "mean": "mean_tokens"}
NAMES |= {"mean_sqrt_len_tokens": "mean_sqrt_len_tokens", "weightedmean": "weightedmean_tokens"}


def sentence_folder(folder, modes=("mean",), width=32, activation="Identity", **settings):
    """A T5 with the modules of sentence-transformers around it: its Dense layer in PyTorch."""
    byte_model(folder)
    kinds = ["Transformer", "Pooling", "Dense", "Normalize"]
    places = ["", "1_Pooling", "2_Dense", "3_Normalize"]
    listed = [
        {"idx": i, "name": str(i), "path": place, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, place) in enumerate(zip(kinds, places, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    flags = {f"pooling_mode_{name}": mode in modes for mode, name in NAMES.items()}
    flags |= {"word_embedding_dimension": 32, "pooling_mode_lasttoken": "lasttoken" in modes}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(flags))
    (folder / "2_Dense").mkdir()
    layer = torch.nn.Linear(32 * len(modes), width)
    shape = {"in_features": 32 * len(modes), "out_features": width, "bias": True}
    name = f"torch.nn.modules.activation.{activation}"
    (folder / "2_Dense" / "config.json").write_text(
        json.dumps({**shape, "activation_function": name})
    )
    state = {"linear.weight": layer.weight.detach(), "linear.bias": layer.bias.detach()}
    torch.save(state, folder / "2_Dense" / "pytorch_model.bin")
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    return layer


def pooled(hidden, mode):
    """One mode by its definition, of states (S, d_model)."""
    n = len(hidden)
    return {
        "cls": hidden[0],
        "max": hidden.max(0),
        "mean": hidden.mean(0),
        "mean_sqrt_len_tokens": hidden.sum(0) / n**0.5,
        "weightedmean": np.arange(1, n + 1) @ hidden / (n * (n + 1) / 2),
        "lasttoken": hidden[-1],
    }[mode]


@pytest.mark.parametrize("modes", [*((mode,) for mode in MODES), ("cls", "mean", "lasttoken")])
def test_pooling_and_dense_layer_of_a_folder(tmp_path, modes):
    layer = sentence_folder(tmp_path / "m", modes, width=24, activation="Tanh", max_seq_length=5)
    model, tokenizer = load(tmp_path / "m", "float32")
    texts = ["ab", "abcdefgh", "c"]
    found = SpeculativeDecoder(model, None, tokenizer).embed(texts)
    assert found.shape == (3, 24)
    for row, text in zip(found, texts, strict=True):
        ids = [*tokenizer(text).input_ids[:-1][:4], 1]  # at most 5 tokens, the end token among them
        hidden = np.array(model.encode(mx.array([ids])))[0]
        vector = np.concatenate([pooled(hidden, mode) for mode in modes])
        expected = np.tanh(layer(torch.tensor(vector, dtype=torch.float32)).detach().numpy())
        np.testing.assert_allclose(row, expected / np.linalg.norm(expected), atol=2e-5)


def test_a_folder_as_later_versions_write_it(tmp_path):
    """The mode by its name, and the tokenizer says how long a text may be."""
    folders = [tmp_path / name for name in ("flags", "names")]
    for folder, limit in zip(folders, ({"max_seq_length": 5}, {}), strict=True):
        torch.manual_seed(0)
        sentence_folder(folder, ("mean_sqrt_len_tokens",), **limit)
    pooling = {"pooling_mode": "mean_sqrt_len_tokens", "include_prompt": True}
    (folders[1] / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    vectors = []
    for folder, limit in zip(
        [folders[0], *2 * [folders[1]]], (int(1e30), 5, int(1e30)), strict=True
    ):
        file = folder / "tokenizer_config.json"
        raw = json.loads(file.read_text())
        file.write_text(json.dumps({**raw, "model_max_length": limit}))
        vectors.append(SpeculativeDecoder(*_parts(load(folder, "float32"))).embed(["abcdefgh"]))
    np.testing.assert_array_equal(vectors[0], vectors[1])
    assert np.abs(vectors[2] - vectors[1]).max() > 1e-3, "the end was cut, and is not without limit"


def test_modules_go_with_a_conversion(tmp_path):
    sentence_folder(tmp_path / "m", do_lower_case=True)
    whole = SpeculativeDecoder(*_parts(load(tmp_path / "m", "float32")))
    folder = convert(tmp_path / "m", tmp_path / "mlx", dtype="float32", encoder_only=True)
    converted = SpeculativeDecoder(*_parts(load(folder, "float32")))
    np.testing.assert_array_equal(converted.embed(["Ab", "ab"]), whole.embed(["ab", "Ab"]))
    assert not list(folder.rglob("*.bin")), "safetensors alone"
    again = convert(tmp_path / "m", folder, overwrite=True, quantize=True, q_group_size=32)
    assert (again / "2_Dense" / "model.safetensors").exists()


def _parts(loaded):
    return loaded[0], None, loaded[1]


@pytest.mark.parametrize(
    "file, content, message",
    [
        ("modules.json", "{}", "no list of modules"),
        ("modules.json", "[1]", "no list of modules"),
        ("modules.json", '[{"type": "a.Pooling", "path": "../x"}]', "no folder of its own"),
        ("modules.json", '[{"type": "a.Pooling", "path": "/etc"}]', "no folder of its own"),
        ("modules.json", '[{"type": "a.Router", "path": ""}]', "module Router"),
        ("modules.json", '[{"type": "a.Dense", "path": "2_Dense"}]', "module Dense"),
        ("modules.json", '[{"type": "a.Transformer", "path": ""}]', "no Pooling module"),
        ("1_Pooling/config.json", "{}", "pooling mode none"),
        ("1_Pooling/config.json", '{"pooling_mode": "best"}', "pooling mode best"),
        ("1_Pooling/config.json", "no", "no valid JSON"),
        (
            "2_Dense/config.json",
            '{"out_features": 8, "activation_function": "os.system"}',
            "system",
        ),
        ("2_Dense/config.json", '{"out_features": 99999999}', "no valid out_features"),
        ("2_Dense/config.json", '{"out_features": 8}', "its tensors are not"),
        ("sentence_bert_config.json", '{"max_seq_length": "many"}', "makes no sense"),
        ("config_sentence_transformers.json", '{"default_prompt_name": "q"}', "makes no sense"),
    ],
)
def test_a_folder_that_cannot_be_honoured_is_refused(tmp_path, file, content, message):
    sentence_folder(tmp_path / "m")
    (tmp_path / "m" / file).write_text(content)
    with pytest.raises(UserError, match=message):
        read_pooling(tmp_path / "m", 32)


def test_a_pickle_that_is_no_tensor_is_refused(tmp_path):
    sentence_folder(tmp_path / "m")
    torch.save({"linear.weight": print}, tmp_path / "m" / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(UserError):
        read_pooling(tmp_path / "m", 32)


def test_a_default_prompt_is_put_in_front(tmp_path):
    sentence_folder(tmp_path / "m")
    plain = SpeculativeDecoder(*_parts(load(tmp_path / "m", "float32"))).embed("query: abc")
    settings = {"default_prompt_name": "q", "prompts": {"q": "query: "}}
    (tmp_path / "m" / "config_sentence_transformers.json").write_text(json.dumps(settings))
    prompted = SpeculativeDecoder(*_parts(load(tmp_path / "m", "float32"))).embed("abc")
    np.testing.assert_array_equal(plain, prompted)


def test_activations_are_those_of_torch():
    x = np.linspace(-4, 4, 101, dtype=np.float32)
    for name, act in ACTIVATIONS.items():
        theirs = getattr(torch.nn, name)()(torch.tensor(x)).numpy()
        np.testing.assert_allclose(np.array(act(mx.array(x))), theirs, atol=1e-6)
