"""Times a GPU's passes with the target's weights in other types: 16-bit ones, and an fp mode.

- An M1 or M2 has no instructions for bfloat16, so float16 may be much faster there
  (https://github.com/ml-explore/mlx-examples/pull/186 measured 29.3 and 18.9 tokens/s on an M2
  Ultra). But in float16 the matrices `wo` stay in float32, and are read more slowly.
- MLX has different kernels for affine mode and for floating-point (fp) modes such as mxfp4. On an
  M1 or M2, a pass reads affine weights again for every position, but reads weights in an fp mode
  only once for 5 positions (`use_qmv_wide` in MLX's backend/metal/quantized.cpp). So on these
  chips, a draft may speed up even a 4-bit target if the target is in an fp mode.
"""

from __future__ import annotations

from typing import Any

from mlx_t5.backend import ON_CUDA, cpu_only, mx, nn, tree_flatten
from mlx_t5.benchmarks.pass_times import ladder, timer
from mlx_t5.checkpoints.checkpoint import keep_float32
from mlx_t5.checkpoints.quantization import Quantization, quantize_predicate
from mlx_t5.model import T5

MODE = "mxfp4"
POINTS = (1, 5, 2, 4, 6, 8)  # positions M


def float16(target: T5, source: int, seconds: float) -> dict[int, float] | None:
    """Speed in float16 relative to bfloat16 of passes over M positions, by M; None on a CPU.

    The target has its own type at the end, but its weights have been rounded.
    """
    if cpu_only():
        return None
    own, rounds = target.dtype, []
    # If the machine becomes slower in the meantime, that affects both types alike.
    for dtype in (mx.bfloat16, mx.float16, mx.float16, mx.bfloat16):
        set_dtype(target, dtype)
        rounds.append(ladder(timer(target, source), POINTS[:2], seconds / 4, 2))
    set_dtype(target, own)
    first, second, third, fourth = rounds
    return {m: (first[m] + fourth[m]) / (second[m] + third[m]) for m in first}


def set_dtype(target: T5, dtype: mx.Dtype) -> None:
    """Converts the floating-point parameters as `load` does, one by one to save memory."""
    parameters = dict(tree_flatten(target.parameters()))
    for name in list(parameters):
        array = parameters.pop(name)
        if mx.issubdtype(array.dtype, mx.floating):
            array = array.astype(mx.float32 if keep_float32(name, dtype) else dtype)
            mx.eval(array)
            target.load_weights([(name, array)], strict=False)
    target.join()


def faster_dtype(float16: dict[int, float]) -> str:
    one, five = (float16[m] for m in POINTS[:2])
    speed = f"{one:.2f} times as fast as in bfloat16 over one position, {five:.2f} times over 5"
    faster = "float16" if one * five > 1 else "bfloat16"
    return f"Passes in float16 are {speed}: take --dtype {faster}."


def fp_mode(target: T5, source: int, seconds: float) -> dict[str, Any] | None:
    """Quantizes a target's layers in place, and times its passes before and after.

    Returns None without an Apple GPU, or for a target that is quantized already.
    """
    way = Quantization.from_options(mode=MODE)

    def fits(path: str, layer: nn.Module) -> bool:
        return quantize_predicate(path) and way.fits(layer.weight.shape)

    quantized = any("scales" in layer for _, layer in target.named_modules())
    if cpu_only() or ON_CUDA or quantized:
        return None
    before = ladder(timer(target, source), POINTS[:1], seconds / 4)
    nn.quantize(target, way.group_size, way.bits, mode=way.mode, class_predicate=fits)
    target.join()
    mx.eval(target.parameters())
    after = ladder(timer(target, source), POINTS, seconds)
    v = {m: seconds / after[1] for m, seconds in after.items()}
    return {"mode": MODE, "speed_up": before[1] / after[1], "v": v}


def float16_text(float16: dict[int, float] | None) -> str:
    return "–" if float16 is None else " ".join(f"{speed:.2f}" for speed in float16.values())


def fp_mode_text(record: dict[str, Any] | None) -> str:
    if record is None:
        return "–"
    return f"{record['mode']}: {record['speed_up']:.2f}, v(5) {record['v'][5]:.2f}"
