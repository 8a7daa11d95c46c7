"""Small folders of sentence-transformers, and the vectors of that library."""

import json

import pytest

from command_line import byte_model
from decoder import SpeculativeDecoder
from families import torch
from mlx_t5.checkpoints.sentence_modules import read_pooling
from mlx_t5.errors import UserError
from model import load

PACKAGE = "sentence_transformers.models."
SETTINGS = {
    "reading": "sentence_bert_config.json",
    "general": "config_sentence_transformers.json",
    "tokenizer": "tokenizer_config.json",
}


def module(name, **config):
    """Returns (name, config, weights) of a module; the weights are random."""
    if name != "Dense":
        return name, config, {}
    sizes = config["in_features"], config["out_features"]
    own = torch.nn.Linear(*sizes, bias=config.get("bias", True)).state_dict()
    return name, config, {f"linear.{part}": tensor for part, tensor in own.items()}


def dense(inputs=32, outputs=32, activation="Identity", **more):
    name = f"torch.nn.modules.{'linear' if activation == 'Identity' else 'activation'}.{activation}"
    return module(
        "Dense", in_features=inputs, out_features=outputs, activation_function=name, **more
    )


def pooling(mode):
    return module("Pooling", pooling_mode=mode, embedding_dimension=32)


def flags(*names):
    others = {"pooling_mode_max_tokens": False, "pooling_mode_mean_sqrt_len_tokens": False}
    named = {f"pooling_mode_{name}": True for name in names}
    return module("Pooling", word_embedding_dimension=32, **others, **named)


NORMALIZE = module("Normalize")


def folder_of(folder, *modules, **settings):
    """Makes a T5 folder with these modules; `settings`: entries of the files named in SETTINGS."""
    byte_model(folder)
    add_modules(folder, *modules)
    for name, entries in settings.items():
        change(folder / SETTINGS[name], entries)
    return folder


def add_modules(folder, *modules):
    """Turns a model's folder into a folder of sentence-transformers."""
    listed = [("Transformer", "")]
    for i, (kind, config, state) in enumerate(modules, 1):
        path = f"{i}_{kind}"
        listed.append((kind, path))
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps(config))
        if state:
            torch.save(state, folder / path / "pytorch_model.bin")
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": kind if "." in kind else PACKAGE + kind}
        for i, (kind, path) in enumerate(listed)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))


def change(file, entries):
    own = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(own | entries))


def embedder(folder):
    model, tokenizer = load(folder, "float32")
    return SpeculativeDecoder(model, None, tokenizer)


def by_sentence_transformers(folder, texts):
    """Returns the library's vectors of texts in one batch."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu").encode(texts)


def refused(folder, message):
    with pytest.raises(UserError, match=message) as error:
        read_pooling(folder, 32)
    assert "\n" not in str(error.value)
    return str(error.value)
