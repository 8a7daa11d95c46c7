"""Command line: converts a Hugging Face T5 checkpoint into an MLX model folder.

    python convert.py --model google-t5/t5-small

Options and output follow mlx-lm. Tensors are loaded, merged with an adapter, cast, quantized and
saved one after the other, so the memory needed does not depend on the number of layers.
"""

from mlx_t5.convert import main

if __name__ == "__main__":
    raise SystemExit(main())
