"""Makes small models in MLX folders, and drafts for them."""

import json
from pathlib import Path

import numpy as np

from mlx_t5.backend import mx, nn, tree_flatten
from mlx_t5.checkpoints.config import T5Config
from mlx_t5.checkpoints.quantization import quantize_predicate
from mlx_t5.model import T5, load
from mlx_t5.network.draft_vocabulary import narrow
from mlx_t5.network.sharing import shared_draft
from mlx_t5.training.draft_folder import save_draft
from random_models import CONFIG, V, randomize

SHAPE = {**CONFIG, "num_decoder_layers": 1, "num_heads": 4}
RELU, UNTIED = {"feed_forward_proj": "relu"}, {"tie_word_embeddings": False}
# By name: entries of the config, and the type when loaded, or quantized.
MODELS = {
    "gated": ({**UNTIED, "model_type": "umt5"}, "float32"),
    "tied": (RELU, "float32"),
    "quantized": (UNTIED, "4 bit"),  # with embedding and head
    "tied-quantized": (RELU, "4 bit"),
    "half": (RELU, "float16"),
}


def make(root: Path) -> None:
    """Writes the folders of every model and of drafts that sometimes agree with their target.

    One draft is a whole model. For each model there is also a draft that uses the model's encoder.
    """
    for name, (entries, kind) in MODELS.items():
        write(root / name, {**SHAPE, **entries}, kind)
        target, _ = load(root / name, dtype_of(name))
        draft, own = shared_draft(target, 1), root / f"{name}-draft"
        moved = [(n, w + 0.5 * w.std() * mx.random.normal(w.shape, key=mx.random.key(i)))
                 for i, (n, w) in enumerate(tree_flatten(draft.parameters()))]  # fmt: skip
        draft.load_weights(moved)
        if name in ("gated", "tied-quantized"):  # its draft has its own vocabulary
            narrow(draft, np.flatnonzero(np.arange(V) % 4 < 3))
        save_draft(draft, root / name, own, dtype=dtype_of(name))
    write(root / "draft", {**SHAPE, **MODELS["gated"][0]}, noise=0.05)


def write(folder: Path, config: dict, kind: str = "float32", noise: float = 0.0) -> None:
    model = T5(T5Config.from_dict(config), not config.get("tie_word_embeddings", True))
    randomize(model, mx.random.split(mx.random.key(3), 400), noise)
    if kind == "4 bit":
        every = lambda path, _: quantize_predicate(path) or path in ("shared", "lm_head")  # noqa: E731
        nn.quantize(model, group_size=32, bits=4, class_predicate=every)
        config = {**config, "quantization": {"group_size": 32, "bits": 4}}
    folder.mkdir()
    arrays = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))


def dtype_of(name: str) -> str:
    """Returns the type in which a model is loaded."""
    return MODELS[name][1].replace("4 bit", "float32")
