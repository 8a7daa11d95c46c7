"""What becomes of a row in a step: it gains tokens, it ends."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_t5.requests import Row

NO_CHOICE = (
    "the model's logits after {} tokens are NaN, infinite or all forbidden; check the {}weights, "
    "bfloat16 or float32 if they are float16"
)


def no_choice(row: Row, decided: int) -> None:
    """Ends a row whose logits after so many tokens leave no token to choose."""
    first = "logits_processors, then the " if row.settings.logits_processors else ""
    row.fail(NO_CHOICE.format(decided, first))


def commit(
    row: Row, tokens: list[int], drafted: int, accepted: int, writer: str, eos: Sequence[int]
) -> tuple[list[int], int]:
    """Adds what a step decided to a row, up to the end of its text.

    Args:
        row: the row.
        tokens: the accepted proposals and the target's own token.
        drafted: proposals that were judged.
        accepted: how many of them were kept.
        writer: who proposed them.
        eos: the end tokens; what follows one, or a stop string, is dropped and not counted.

    Returns:
        The tokens that count, and how many of them were proposals.
    """
    end = next((i for i, token in enumerate(tokens) if token in eos), None)
    row.ended = end is not None
    if end is not None:
        tokens = tokens[: end + 1]
    if row.watch:
        read = row.watch.take(tokens[: len(tokens) - row.ended])
        if row.watch.stopped:
            tokens, row.ended = tokens[:read], False
    if row.ended or (row.watch and row.watch.stopped):
        drafted, accepted = min(drafted, len(tokens)), min(accepted, len(tokens))
        row.finish_reason = "stop"
    row.committed += tokens
    row.writers += [writer] * accepted + ["target"] * (len(tokens) - accepted)
    if row.finish_reason is None and row.decided >= row.settings.max_tokens:
        row.finish_reason = "length"
    if row.watch and row.finish_reason:
        row.watch.finish()
    row.stats.count(drafted, accepted, writer)
    return tokens, accepted
