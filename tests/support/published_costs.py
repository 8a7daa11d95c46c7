"""What passes cost on GPUs, as measured or published: M → time of a pass over M positions."""

from mlx_t5.drafting.costs import Costs

# Times of one product or pass, in any unit, by others; nothing was measured here.
PUBLISHED = {
    # mlx 0.32.0, 4096 × 24576: https://github.com/ml-explore/mlx/issues/3839
    "4 bits, M4 Pro": {1: 1, 2: 1.03, 3: 1.22, 4: 1.47, 6: 2.07, 8: 2.69},
    # 5120 × 17408, µs: https://github.com/ml-explore/mlx/pull/3863
    "4 bits, M3 Max": dict(
        zip((1, 2, 4, 6, 8, 9, 10, 32), (129, 129, 165, 263, 323, 405, 508, 513), strict=True)
    ),
    # a 70B model, ms: https://github.com/ml-explore/mlx/pull/3791
    "4 bits, M5 Max": {1: 75.9, 3: 84.8, 5: 112.7, 8: 170.8, 12: 241.5, 16: 296.0},
    # M3 Ultra with mlx 0.31.2, µs: the kernels that M1 and M2 have to this day
    # https://github.com/ml-explore/mlx/issues/4265
    "4 bits, every row by itself": {1: 41, 2: 76, 4: 134, 7: 218, 8: 252, 16: 260},
    "bf16, matrix kernel from 2": {1: 271, 2: 539, 16: 541},
    # a 7B model: https://arxiv.org/abs/2403.09919
    "fp16, M1 Max": {1: 1, 5: 1.8, 15: 2.2, 16: 2.7},
}
T5_11B, T5_LARGE = 0.02, 0.1  # c of a t5-small in front of them, about


def pair(times: dict[int, float], c: float) -> Costs:
    """Of a target whose passes take these times, and a draft that takes a share c of one."""
    return Costs({m: float(time) for m, time in times.items()}, {1: c * times[1]})


# One H100, ms. Both were bound by the host, which describes a pass over 5 positions as fast as one
# over 1, so v is flat. A regular step of t5-large took 7.0 ms and one with 4 drafts of a t5-small
# 16: a draft pass took (16 - 7.0) / 4. Before a t5-11b 181 tokens/s at 3.45 tokens a step were 19.1
# ms a step, and a regular one took 7.3 to 8.9. A draft that the host describes in one operation
# would leave c near 0.1.
H100 = {
    "t5-large, H100": pair({1: 7.0, 16: 7.0}, (16 - 7.0) / 4 / 7.0),
    "t5-11b, H100": pair({1: 8.1, 16: 8.4}, (19.1 - 8.1) / 4 / 8.1),
    "H100, c = 0.2": pair({1: 1.0, 16: 1.05}, 0.2),
    "H100, c = 0.1": pair({1: 1.0, 16: 1.05}, 0.1),
}
