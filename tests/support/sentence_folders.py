"""Makes small folders of sentence-transformers, and computes vectors with that library."""

import json

import torch

from command_line import byte_model

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
    place = "linear" if activation == "Identity" else "activation"
    more["activation_function"] = f"torch.nn.modules.{place}.{activation}"
    return module("Dense", in_features=inputs, out_features=outputs, **more)


def pooling(mode):
    return module("Pooling", pooling_mode=mode, embedding_dimension=32)


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
        path = folder / f"{i}_{kind}"
        listed.append((kind, path.name))
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
        if state:
            torch.save(state, path / "pytorch_model.bin")
    named = [(kind if "." in kind else PACKAGE + kind, path) for kind, path in listed]
    entries = [{"idx": i, "name": str(i), "path": p, "type": t} for i, (t, p) in enumerate(named)]
    (folder / "modules.json").write_text(json.dumps(entries))


def change(file, entries):
    own = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(own | entries))
