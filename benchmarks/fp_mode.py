"""Times a target's passes with its layers quantized in a floating-point (fp) mode such as mxfp4.

MLX has different kernels for affine mode and for fp modes. On an M1 or M2, a pass reads affine
weights again for every position, but reads weights in an fp mode only once for 5 positions
(`use_qmv_wide` in MLX's backend/metal/quantized.cpp). So on these chips, a draft may speed up even
a 4-bit target if the target is in an fp mode.
"""

from __future__ import annotations

from typing import Any

from benchmarks.passes import ladder, timer
from mlx_t5.backend import ON_CUDA, cpu_only, mx, nn
from mlx_t5.checkpoints.quantization import Quantization, quantize_predicate
from model import T5

MODE = "mxfp4"
POINTS = (1, 5, 2, 4, 6, 8)  # positions M


def measured(target: T5, source: int, seconds: float) -> dict[str, Any] | None:
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


def table_text(record: dict[str, Any] | None) -> str:
    if record is None:
        return "–"
    return f"{record['mode']}: {record['speed_up']:.2f}, v(5) {record['v'][5]:.2f}"
