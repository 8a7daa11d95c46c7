#!/usr/bin/env bash
# MLX 0.32.4: nvfp4 without a global scale rounds T5's small weights to zero.
#
# Expected: nvfp4 (4 bits, a scale for each 16 weights) keeps at least what mxfp4 (4 bits, a scale
# for each 32) does, whatever the weights' size. Seen: nvfp4's scales are E4M3 numbers, of which none
# is below 2^-9, and unless the caller passes a global_scale, nothing multiplies them. So of weights
# as small as T5 starts its query projections, (d_model d_kv)^-0.5, most become 0; at t5-11b's sizes:
#
#   standard deviation 0.00276
#   mxfp4: 11.7 % of the weights become 0, relative error 0.12
#   nvfp4: 63.4 % of the weights become 0, relative error 0.69
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check 'mlx[cpu]==0.32.4'
venv/bin/python - <<'PY' 2>errors || { cat errors >&2; exit 1; }
import mlx.core as mx

size = (1024 * 128) ** -0.5  # d_model 1024, d_kv 128
weights = size * mx.random.normal((1024, 1024), key=mx.random.key(0))
print(f"standard deviation {size:.5f}")
zeros = {}
for mode in ("mxfp4", "nvfp4"):
    back = mx.dequantize(*mx.quantize(weights, mode=mode), mode=mode)
    zeros[mode] = mx.mean(back == 0).item()
    error = (mx.linalg.norm(back - weights) / mx.linalg.norm(weights)).item()
    lost = f"{100 * zeros[mode]:.1f} % of the weights become 0"
    print(f"{mode}: {lost}, relative error {error:.2f}")
assert zeros["nvfp4"] > 0.5 > zeros["mxfp4"], "nvfp4 keeps small weights now"
PY
