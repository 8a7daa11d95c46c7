"""Pieces of documents that run into a loop: each is cut smaller, decoded again, and joined.

A model may loop on a sentence, but not on its parts. A part that loops is cut again. After
`MOST_CUTS` cuts, the text up to the loop stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mlx_t5.engine.rows import PieceResult, Result, Row, Stats
from mlx_t5.text.prompts import Prompt

MOST_CUTS = 2


def parts_to_decode(row: Row) -> list[Row]:
    """The rows to decode in place of a finished row that looped; [] if its result is final.

    Once all parts are finished, they are joined to the row's result.
    """
    if row.finish_reason != "repetition" or row.joined or not row.piece:
        return []
    from mlx_t5.text.documents import smaller_parts  # slow to import, and few texts loop

    prompt, row_of = row.piece
    if row.parts:
        row.joined = _joined(row, prompt, smaller_parts(prompt.words))
    elif len(prompt.parts) < MOST_CUTS:
        prefix, words = prompt.prefix or "", prompt.words
        for n, (start, end) in enumerate(smaller_parts(words)):
            source, numbers = prefix + words[start:end], (*prompt.parts, n)
            part = row_of(replace(prompt, source=source, prediction=None, parts=numbers))
            part.whole = row
            row.parts.append(part)
    return [] if row.joined else row.parts


def _joined(row: Row, prompt: Prompt, spans: Sequence[tuple[int, int]]) -> Result:
    """The parts' answers with the text between the parts; if a part fails, the piece fails."""
    stats, end, texts = Stats(), 0, list[str]()
    result = Result(None, [], [], "stop", stats)
    for name in ("target_calls", "encode_seconds", "decode_seconds"):  # of the discarded answer
        setattr(stats, name, getattr(row.stats, name))
    for span, part in zip(spans, row.parts, strict=True):
        answer = part.result()
        stats.add(answer.stats)
        texts += [prompt.words[end : span[0]], answer.text or ""]
        end = span[1]
        result.tokens += answer.tokens
        result.origins += answer.origins
        piece = PieceResult(*span, answer.text or "", answer.finish_reason, answer.error)
        result.pieces.append(piece)
        result.error = result.error or answer.error
        # The first in the alphabet: error, length, repetition, stop.
        result.finish_reason = min(result.finish_reason, answer.finish_reason)
    result.text = "".join([*texts, prompt.words[end:]])
    return result
