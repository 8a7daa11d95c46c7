"""What speculative decoding should gain, from how often proposals are kept and what passes cost.

If each proposal is kept with probability alpha, independently, a step with gamma of them yields
E(gamma) = (1 - alpha^(gamma+1)) / (1 - alpha) tokens and costs gamma c + v(gamma+1) passes of one
position, so decoding gets faster by S(gamma) = E(gamma) / (gamma c + v(gamma+1)): theorem 3.8 of
https://arxiv.org/abs/2211.17192, with a measured v in place of 1.

Symbols: alpha acceptance probability, gamma proposals, c cost of a draft pass, v(M) cost of a
target pass over M positions, both in units of a target pass over one.
"""

from __future__ import annotations

from collections.abc import Mapping


def expected_tokens(alpha: float, gamma: int) -> float:
    """E(gamma) = 1 + alpha + … + alpha^gamma."""
    return (1 - alpha ** (gamma + 1)) / (1 - alpha) if alpha < 1 else gamma + 1.0


def speed_up(alpha: float, gamma: int, c: float, v: Mapping[int, float]) -> float:
    """S(gamma).

    Args:
        alpha: acceptance probability.
        gamma: proposals a step.
        c: cost of a draft pass.
        v: M → cost of verifying M positions; v[1] is 1.
    """
    return expected_tokens(alpha, gamma) / (gamma * c + v[gamma + 1])


def cost(widths: Mapping[int, int], draft_passes: int, c: float, v: Mapping[int, float]) -> float:
    """What passes cost together, in target passes over one position.

    Args:
        widths: M → target passes that verified M positions.
        draft_passes: passes of the draft.
        c: cost of one of them.
        v: M → cost of verifying M positions.
    """
    return sum(count * v[width] for width, count in widths.items()) + draft_passes * c


def promised_tokens(alpha: float, widths: Mapping[int, int]) -> float:
    """Tokens that target passes over so many positions are expected to yield: sum of E(M - 1)."""
    return sum(count * expected_tokens(alpha, width - 1) for width, count in widths.items())
