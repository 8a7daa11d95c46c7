"""Makes small random T5s without transformers, in any type."""

from mlx_t5.backend import mx, nn, tree_flatten
from mlx_t5.checkpoints.config import T5Config
from mlx_t5.checkpoints.quantization import quantize_predicate
from mlx_t5.model import T5

V = 61
CONFIG = {
    "model_type": "t5", "vocab_size": V, "d_model": 64, "d_kv": 32, "d_ff": 128, "num_layers": 1,
    "num_decoder_layers": 2, "num_heads": 2, "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20, "feed_forward_proj": "gated-gelu",
}  # fmt: skip


def randomize(model: T5, keys: mx.array, noise: float, dtype: mx.Dtype = mx.float32) -> None:
    """Gives a model random weights, scaled so that its greedy text has many different tokens.

    Args:
        model: changed in place.
        keys: at least two keys for each parameter.
        noise: the relative distance from the weights of these keys.
        dtype: the type of the weights.
    """
    key_iterator, weights = iter(keys), []
    for name, like in tree_flatten(model.parameters()):
        weight = mx.random.normal(like.shape, key=next(key_iterator))
        weight += noise * mx.random.normal(like.shape, key=next(key_iterator))
        if "norm" in name:
            weight = mx.abs(weight) + 0.5
        elif "shared" not in name and "relative" not in name:
            weight *= like.shape[-1] ** -0.5
        weights.append((name, weight.astype(dtype)))
    model.load_weights(weights)


def random_t5(mode: str = "float32", seed: int = 0, noise: float = 0.0) -> T5:
    """Returns a random model whose greedy text has many different tokens.

    Args:
        mode: a type, or "4 bit" for a quantized model that computes in float32.
        seed: the seed of the weights.
        noise: the relative distance from these weights, for a draft.
    """
    model = T5(T5Config.from_dict(CONFIG))
    dtype = mx.float32 if mode == "4 bit" else getattr(mx, mode)
    randomize(model, mx.random.split(mx.random.key(seed), 200), noise, dtype)
    if mode == "4 bit":
        nn.quantize(model, group_size=32, bits=4, class_predicate=quantize_predicate)
    model.join()
    return model
