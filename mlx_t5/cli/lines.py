"""What a result looks like on one line: a text, coloured or not, or an object of JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from mlx_t5.engine.rows import Result
    from mlx_t5.scoring.pairs import Score
    from mlx_t5.text.detokenizer import StreamingDetokenizer

LineOf = Callable[[Any, Any], str]  # the line of a prompt and what became of it


class Painter:
    """Shows who wrote each token: green the draft, cyan copied from the source, magenta the target.

    With `NO_COLOR` set (https://no-color.org) brackets and braces stand for the first two. A token
    that ends inside a character is shown with the token that completes it.
    """

    def __init__(self, no_color: bool):
        colours = {"draft": 32, "copy": 36, "target": 35}
        self._forms = {writer: f"\033[{c}m{{}}\033[0m" for writer, c in colours.items()}
        if no_color:
            self._forms = {"draft": "[{}]", "copy": "{{{}}}", "target": "{}"}

    @property
    def legend(self) -> str:
        """One line that explains the colours."""
        names = {"draft": "by the draft", "copy": "copied", "target": "by the target"}
        return "tokens: " + " ".join(self._forms[w].format(name) for w, name in names.items())

    def paint(self, pieces: Iterable[str], writers: Iterable[str], rest: str = "") -> str:
        """Colours text token by token.

        Args:
            pieces: the text that each token completed.
            writers: who wrote each of them: "draft", "copy" or "target".
            rest: text after the last of them, which the target gets.
        """
        authors = [*zip(pieces, writers, strict=True), (rest, "target")]
        return "".join(self._forms[writer].format(text) for text, writer in authors if text)

    def line(self, result: Result, detokenizer: StreamingDetokenizer) -> str:
        """A whole result, coloured, on one line; the detokenizer is a fresh one."""
        pieces = [*(detokenizer.add([token]) for token in result.tokens), detokenizer.finish()]
        room = len(result.text or "")  # the tokens of a stop string are not shown
        for i, piece in enumerate(pieces):
            pieces[i] = piece[:room]
            room -= len(pieces[i])
        return one_line(self.paint(pieces[:-1], result.writers, pieces[-1]))


def text_lines(as_json: bool, aside: bool, paint: Callable[[Result], str] | None = None) -> LineOf:
    """The lines of texts: an empty one, or an object with the error, where there is no text.

    Args:
        as_json: one JSON object a line; otherwise one text a line.
        aside: whether coloured lines are shown on standard error besides.
        paint: makes a coloured line of a result; None has none.
    """

    def line(prompt: Any, result: Result) -> str:
        painted = paint(result) if paint and not result.error else None
        if painted is not None and aside:
            print(painted, file=sys.stderr)
        if as_json:
            return text_object(prompt, result)
        return one_line(result.text or "") if aside or painted is None else painted

    return line


def one_line(text: str) -> str:
    r"""A text on one line: a line break in it is written as the two characters `\n`."""
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("\n", r"\n")


def text_object(prompt: Any, result: Result) -> str:
    """The object that `--json` promises to scripts."""
    record: dict[str, Any] = {
        "prompt": _text(prompt),
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "stats": asdict(result.stats),
    }
    if result.score is not None:
        record["score"] = result.score
    if result.error:
        record["error"] = result.error
    return json.dumps(record, ensure_ascii=False)


def score_object(pair: Any, score: Score) -> str:
    """The object of a pair of prompt and target."""
    prompt, target = pair if isinstance(pair, tuple) else ("", "")
    record: dict[str, Any] = {"prompt": prompt, "target": target}
    record |= {"logprob": None, "token_logprobs": [], "tokens": []}
    if score.error:
        record["error"] = score.error
    else:
        record |= {name: getattr(score, name) for name in ("logprob", "token_logprobs", "tokens")}
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


def embedding_object(prompt: Any, vector: np.ndarray | Exception) -> str:
    """The object of a prompt."""
    record: dict[str, Any] = {"prompt": _text(prompt), "embedding": None}
    if isinstance(vector, Exception):
        record["error"] = str(vector)
    else:
        record["embedding"] = [float(str(number)) for number in vector]
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


def error_of(outcome: Any) -> str | None:
    """What went wrong with a prompt, if anything did."""
    return str(outcome) if isinstance(outcome, Exception) else getattr(outcome, "error", None)


def _text(prompt: Any) -> str:
    """A prompt; "" for one that could not be read."""
    return prompt if isinstance(prompt, str) else ""
