"""Small models in MLX folders, and the results of decoders with them.

python shared_models.py FOLDER NAMES    # as a rank of mlx.launch; writes a file for each rank
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import decoder
from decoder import SpeculativeDecoder
from devices import is_refusal
from mlx_t5.backend import mx, nn, tree_flatten
from mlx_t5.checkpoints.quantization import quantize_predicate
from mlx_t5.drafting.draft_model import DraftModel
from mlx_t5.drafting.source_copy import CopyOrDraft, SourceCopy
from mlx_t5.engine import beams
from mlx_t5.errors import UserError
from mlx_t5.machines.launched import join_ranks
from mlx_t5.network.config import T5Config
from mlx_t5.network.draft_vocabulary import narrow
from mlx_t5.network.interface import WeightsRead
from mlx_t5.network.ranks import ranks_of
from mlx_t5.network.sharing import shared_draft
from mlx_t5.training.draft_folder import save_draft
from model import T5, load
from random_models import randomise

V = 61  # no number of ranks divides it
SHAPE = {
    "model_type": "t5", "vocab_size": V, "d_model": 64, "d_kv": 32, "d_ff": 128, "num_layers": 1,
    "num_decoder_layers": 1, "num_heads": 4, "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20, "decoder_start_token_id": 0,
}  # fmt: skip
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
# By name: config, whether it has a separate head, and the type when loaded, or quantised.
MODELS: dict[str, tuple[dict, bool, str]] = {
    "gated": ({**GATED, "model_type": "umt5"}, True, "float32"),
    "tied": ({"feed_forward_proj": "relu"}, False, "float32"),
    "quantised": (GATED, True, "4 bit"),  # with embedding and head
    "tied-quantised": ({"feed_forward_proj": "relu"}, False, "4 bit"),
    "half": ({"feed_forward_proj": "relu"}, False, "float16"),
}
NARROW = ("gated", "tied-quantised")  # their drafts have their own vocabulary
PROMPTS = [[5, 9, 13, 21, 9, 1], [7, 30, 30, 1], [40, 41, 42, 43, 44, 45, 46, 47, 1]]


def make(root: Path) -> None:
    """Writes the folders of every model and of drafts that sometimes agree with their target.

    One draft is whole; each model also has a draft that uses its encoder.
    """
    for name, (config, head, kind) in MODELS.items():
        write(root / name, {**SHAPE, **config}, head, kind == "4 bit")
        target, _ = load(root / name, dtype_of(name))
        draft, own = shared_draft(target, 1), root / f"{name}-draft"
        moved = [(n, w + 0.5 * w.std() * mx.random.normal(w.shape, key=mx.random.key(i)))
                 for i, (n, w) in enumerate(tree_flatten(draft.parameters()))]  # fmt: skip
        draft.load_weights(moved)
        if name in NARROW:
            narrow(draft, np.flatnonzero(np.arange(V) % 4 < 3))
        save_draft(draft, root / name, own, dtype=dtype_of(name))
    write(root / "draft", {**SHAPE, **MODELS["gated"][0]}, True, False, noise=0.05)


def write(folder: Path, config: dict, head: bool, quantised: bool, noise: float = 0.0) -> None:
    model = T5(T5Config.from_dict(config), head)
    randomise(model, mx.random.split(mx.random.key(3), 400), noise)
    if quantised:
        nn.quantize(model, group_size=32, bits=4, class_predicate=quantised_layer)
        config = {**config, "quantization": {"group_size": 32, "bits": 4}}
    folder.mkdir()
    arrays = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))


def quantised_layer(path: str, module: nn.Module) -> bool:
    return quantize_predicate(path) or path in ("shared", "lm_head")


def results(root: Path, name: str, model: Any, draft: T5) -> dict[str, Any]:
    """Returns the results of decoders with this target; the first model runs every variant."""
    short = {"max_tokens": 5}  # ranks that share cores wait long for each other
    made: dict[str, Any] = {}
    made["logits"] = model(mx.array([PROMPTS[0]]), mx.array([[0, 4, 7]])).tolist()
    decoder = SpeculativeDecoder(model, draft, num_draft=3)
    made["greedy"] = tokens(decoder.generate(PROMPTS, **short))
    own, _ = load(root / f"{name}-draft", shared_with=model)
    sharing = SpeculativeDecoder(model, own, num_draft=3)
    made["shared encoder"] = counted(sharing.generate(PROMPTS, **short))
    if name != "gated":
        return made
    made["sampled"] = tokens(decoder.generate(PROMPTS, temp=0.8, top_k=20, seed=4, **short))
    some = sharing.generate(PROMPTS, temp=0.8, seed=4, batch_size=2, **short)
    made["shared encoder, sampled"] = counted(some)
    small(own, ranks_of(model).rank)
    adapting = SpeculativeDecoder(model, own, num_draft="auto")
    made["auto"] = tokens(adapting.generate(PROMPTS, **short))
    made["auto, sampled"] = counted(adapting.generate(PROMPTS, temp=0.8, seed=4, **short))
    copying = SpeculativeDecoder(model, SourceCopy(), num_draft=4)
    made["lookup"] = tokens(copying.generate(PROMPTS, **short))
    found = decoder.generate(PROMPTS, num_beams=3, num_return_sequences=2, **short)
    made["beams"], made["beam_scores"] = tokens(found), [each.score for each in found]
    scores = decoder.score(PROMPTS[:2], [[5, 6, 1], [8, 1]])
    made["scores"] = [each.token_logprobs for each in scores]
    both = CopyOrDraft(SourceCopy(), DraftModel(own, model))
    exact = SpeculativeDecoder(model, both, num_draft=3, exact=True)
    try:
        made["exact"] = counted(exact.generate(PROMPTS, batch_size=3, **short))
    except UserError as error:
        if not is_refusal(error):
            raise
        made["exact"] = None
    made["vectors"] = decoder.embed(PROMPTS).tolist()
    return made


def small(draft: T5, rank: int) -> None:
    """Makes "auto" expect free drafts on rank 0 and far too slow drafts on other ranks."""
    draft.weights_read = lambda: WeightsRead(rank * 10**6, 0, "float32")


def tokens(found: Any) -> list[list[int]]:
    return [each.tokens for each in found]


def counted(found: Any) -> list[tuple[list[int], int, int]]:
    """Returns the tokens of each result, and its numbers of proposed and accepted tokens."""
    return [(each.tokens, each.stats.drafted, each.stats.accepted) for each in found]


def collectives(model: T5) -> list[int]:
    """Returns the numbers of collectives of an encoding, a cache and a decoder's pass."""
    counts = [model.ranks.collectives]
    states = model.encode(mx.array([PROMPTS[0]]))
    counts.append(model.ranks.collectives)
    cache = model.cache(states, capacity=4)
    counts.append(model.ranks.collectives)
    mx.eval(model.decode(mx.array([[0, 4, 7]]), cache, [0]))
    counts.append(model.ranks.collectives)
    return [b - a for a, b in zip(counts, counts[1:], strict=False)]


def sabotage(rank: int, draft: T5) -> None:
    """Makes a rank draft and decide differently from rank 0, as an unlike machine may."""
    if rank:
        accept, largest = decoder.accept, beams.largest
        decoder.accept = lambda *given: tuple((each + rank) % V for each in accept(*given))
        beams.largest = lambda *given: tuple(each[:, ::-1] for each in largest(*given))
        randomise(draft, mx.random.split(mx.random.key(rank), 400), 0.1)


def main(root: Path, names: list[str]) -> None:
    """Runs one rank and writes its results."""
    ranks = join_ranks()
    draft, _ = load(root / "draft", "float32")
    sabotage(ranks.rank, draft)
    models, report = {}, {}
    for name in names:
        models[name], _ = load(root / name, dtype_of(name), group=ranks.group)
        report[name] = results(root, name, models[name], draft)
    report["collectives"] = {name: collectives(model) for name, model in models.items()}
    report["answers"] = ranks.gathered([ranks.rank, "ä"]), ranks.any(ranks.rank == 1)
    (root / f"{ranks.rank}-of-{ranks.size}.json").write_text(json.dumps(report))


def dtype_of(name: str) -> str:
    """Returns the type in which a model is loaded."""
    kind = MODELS[name][2]
    return kind if kind == "float16" else "float32"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
