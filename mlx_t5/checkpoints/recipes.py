"""The modes of quantization and the names of recipes, for options that are read without MLX."""

from collections.abc import Mapping

# mode -> (supported bits, supported group sizes); mlx-lm's defaults come first
MODES: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "affine": ((4, 2, 3, 5, 6, 8), (64, 32, 128)),
    "mxfp4": ((4,), (32,)),
    "mxfp8": ((8,), (32,)),
    "nvfp4": ((4,), (16,)),
}
# mlx-lm's recipes `mixed_A_B` differ from vo_A_B: they give B bits to the output head and, at some
# depths only, to `v` and the feed-forward's output layer.
VO_4_5 = "vo_4_5"  # 4 bits in most layers, 5 in attention's `v` and `o`
EMBED_8 = "embed_8"  # 8 bits in the embedding and the output head, any bits in other layers
LAYERS = "layers"  # attention and feed-forward only, even if the vocabulary is large
PREDICATES = (VO_4_5, EMBED_8, f"{VO_4_5}+{EMBED_8}", LAYERS)
LARGE_VOCABULARY = 100_000  # tokens; with fewer, the head is a small part of what a pass reads
