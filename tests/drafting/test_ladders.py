"""How many proposals suit the ladders v(M) of Apple's GPUs, published and by what kernels read.

Figures are times of one product or pass over M rows, by others; nothing was measured here.
"""

import math

import pytest

from mlx_t5.drafting.adaptive import Adaptive
from mlx_t5.drafting.costs import (
    BUDGET_SECONDS,
    LONGEST,
    NEEDED,
    TARGET_POINTS,
    Costs,
    ladder,
    rising,
)

MLX = "https://github.com/ml-explore/mlx/"
# M → time, in any unit, and where it is from.
PUBLISHED = {
    # mlx 0.32.0, 4096 × 24576
    "4 bits, M4 Pro": ({1: 1, 2: 1.03, 3: 1.22, 4: 1.47, 6: 2.07, 8: 2.69}, MLX + "issues/3839"),
    # 5120 × 17408, ms
    "4 bits, M3 Max": (
        {1: 0.129, 2: 0.129, 4: 0.165, 6: 0.263, 8: 0.323, 9: 0.405, 10: 0.508, 32: 0.513},
        MLX + "pull/3863",
    ),
    # a 70B model, ms
    "4 bits, M5 Max": (
        {1: 75.9, 3: 84.8, 5: 112.7, 8: 170.8, 12: 241.5, 16: 296.0},
        MLX + "pull/3791",
    ),
    # M3 Ultra with mlx 0.31.2, ms: the kernels that M1 and M2 have to this day
    "4 bits, every row by itself": (
        {1: 0.041, 2: 0.076, 4: 0.134, 7: 0.218, 8: 0.252, 16: 0.260},
        MLX + "issues/4265",
    ),
    "bf16, matrix kernel from 2": ({1: 0.271, 2: 0.539, 16: 0.541}, MLX + "issues/4265"),
    # a 7B model
    "fp16, M1 Max": ({1: 1, 5: 1.8, 15: 2.2, 16: 2.7}, "https://arxiv.org/abs/2403.09919"),
}
T5_11B, T5_LARGE = 0.02, 0.1  # c of a t5-small in front of them, about


def chosen(costs, alpha, kind="draft"):
    """What `auto` proposes where this share is kept."""
    adaptive = Adaptive(lambda: costs, [kind], LONGEST)
    adaptive.learn((), kind, 100_000, round(alpha * 100_000))
    return adaptive.limits((), 1).get(kind, 0)


@pytest.mark.parametrize(
    ("name", "c", "numbers"),
    [
        ("4 bits, M4 Pro", T5_11B, (2, 2, 3)),
        ("4 bits, M4 Pro", T5_LARGE, (1, 2, 3)),
        ("4 bits, M3 Max", T5_11B, (2, 3, 3)),
        ("4 bits, M3 Max", T5_LARGE, (2, 3, 3)),
        ("4 bits, M5 Max", T5_11B, (2, 3, 4)),
        ("4 bits, M5 Max", T5_LARGE, (2, 2, 4)),
        ("4 bits, every row by itself", T5_11B, (0, 0, 15)),
        ("4 bits, every row by itself", T5_LARGE, (0, 0, 0)),
        ("bf16, matrix kernel from 2", T5_11B, (7, 11, 15)),
        ("bf16, matrix kernel from 2", T5_LARGE, (0, 6, 13)),
        ("fp16, M1 Max", T5_11B, (2, 7, 14)),
        ("fp16, M1 Max", T5_LARGE, (1, 2, 10)),
    ],
)
def test_the_number_that_suits_a_published_ladder(name, c, numbers):
    ms = PUBLISHED[name][0]
    costs = Costs({m: float(t) for m, t in ms.items()}, {1: c * ms[1]})
    assert tuple(chosen(costs, alpha) for alpha in (0.6, 0.75, 0.9)) == numbers


def test_without_a_draft_pass_to_pay_for_copies_pay_where_they_mostly_hold():
    each = Costs(PUBLISHED["4 bits, every row by itself"][0], {})
    assert [chosen(each, alpha, "copy") for alpha in (0.4, 0.75, 0.95)] == [0, 0, LONGEST]


# Staircases with their steps where the kernels have them: see costs.py.
KERNELS = {
    "4 bits, M3 and later": lambda m: min(math.ceil(m / 5) + 0.1 * m, 4.0),
    "bf16, M3 and later": lambda m: min(0.5 * math.ceil(m / 5) + 0.02 * m + 0.48, 2.3),
    "bf16, M1 and M2": lambda m: 1.0 if m == 1 else 2 + 0.01 * m,
    "4 bits, M1 and M2": lambda m: 0.1 + 0.9 * m if m < 6 else 5.0,
    "4 bits, M1 Ultra and M2 Ultra": lambda m: 0.1 + 0.8 * m if m < 12 else 8.9,
    "one step at 10": lambda m: 1.0 if m <= 10 else 2.0,
    "one step at 12": lambda m: 1.0 if m <= 12 else 2.0,
    "one step at 15": lambda m: 1.0 if m <= 15 else 2.0,
}


def speed_up(passes, c, alpha, gamma):
    """S(gamma), by the formula."""
    cost = gamma * c + passes(gamma + 1) / passes(1)
    return sum(alpha**i for i in range(gamma + 1)) / cost


@pytest.mark.parametrize("c", [T5_11B, T5_LARGE])
@pytest.mark.parametrize("kernels", KERNELS)
def test_the_points_that_are_measured_tell_as_much_as_all(kernels, c):
    passes = KERNELS[kernels]
    every = Costs({m: passes(m) for m in range(1, LONGEST + 2)}, {1: c * passes(1)})
    fast = rising(ladder(lambda m: 1e-4 * passes(m), TARGET_POINTS, BUDGET_SECONDS))
    slow = rising(ladder(passes, TARGET_POINTS, BUDGET_SECONDS))  # in seconds
    assert list(fast) == sorted(TARGET_POINTS) and list(slow) == sorted(TARGET_POINTS[:NEEDED])
    for alpha in (0.4, 0.6, 0.75, 0.85, 0.95):
        best = chosen(every, alpha)
        assert chosen(Costs(fast, {1: c * fast[1]}), alpha) == best
        if not kernels.startswith("one step"):
            hasty = chosen(Costs(slow, {1: c * slow[1]}), alpha)
            fastest = speed_up(passes, c, alpha, best)
            assert speed_up(passes, c, alpha, hasty) >= 0.85 * fastest
