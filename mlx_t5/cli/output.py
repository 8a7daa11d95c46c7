"""Formats results as lines of text or JSON, and writes them, or vectors, to files safely."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from mlx_t5.cli.input import Line
from mlx_t5.disk import lock, partial_file, put_in_place, replace_file
from mlx_t5.errors import UserError, log, readable
from mlx_t5.text.detokenizer import StreamingDetokenizer

if TYPE_CHECKING:
    import numpy as np

    from mlx_t5.cli.generate_options import MainOptions
    from mlx_t5.engine.rows import Result, Stats
    from mlx_t5.scoring.pairs import Score

OF_RESULTS = ("score", "error", "pieces")  # fields of some results
ARRAY = ".npy"  # suffix of a NumPy array's file
UNFINISHED = "note: what was finished is in {}"
LineOf = Callable[[Line, Any], str]  # makes a line of the output from one of the input


class TokenHighlighter:
    """Colors tokens by their origin: green (draft model), cyan (copied), magenta (target).

    Copied tokens are from the prompt, from earlier output or from the user's prediction.
    """

    def __init__(self, tokenizer: Any = None):
        self._tokenizer, colors = tokenizer, {"draft": 32, "copy": 36, "target": 35}
        self._forms = {origin: f"\033[{c}m{{}}\033[0m" for origin, c in colors.items()}

    @staticmethod
    def suits(stream: TextIO) -> bool:
        """Whether a stream is a terminal that shows colors (https://no-color.org)."""
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
        return not plain and stream.isatty()

    @property
    def legend(self) -> str:
        names = {"draft": "by the draft", "copy": "copied", "target": "by the target"}
        return "tokens: " + " ".join(self._forms[w].format(name) for w, name in names.items())

    def highlight(self, segments: Iterable[str], origins: Iterable[str], rest: str = "") -> str:
        """Colors a text token by token.

        Args:
            segments: for each token, the text that it completed; "" if it completed none.
            origins: for each token, its origin: "draft", "copy" or "target".
            rest: text after the last token, shown in the target's color.
        """
        authors = [*zip(segments, origins, strict=True), (rest, "target")]
        return "".join(self._forms[origin].format(text) for text, origin in authors if text)

    def line(self, result: Result) -> str:
        detokenizer = StreamingDetokenizer(self._tokenizer)
        segments = [*map(detokenizer.add, result.tokens), detokenizer.finish()]
        room = len(result.text or "")  # the tokens of a stop string are not shown
        for i, piece in enumerate(segments):
            segments[i] = piece[:room]
            room -= len(segments[i])
        return one_line(self.highlight(segments[:-1], result.origins, segments[-1]))


def text_lines(as_json: bool, aside: bool, highlighter: TokenHighlighter | None = None) -> LineOf:
    """A function that makes the output line of a prompt and its result.

    If the prompt has failed, the line is empty, or with `as_json` an object with the error.

    Args:
        as_json: whether a line is a JSON object; otherwise it is a text.
        aside: whether to print a colored copy of each line on standard error, and return the plain
            line.
        highlighter: colors the lines; None for no colors.
    """

    def output_line(line: Line, result: Result) -> str:
        highlighted = highlighter.line(result) if highlighter and not result.error else None
        if highlighted is not None and aside:
            log(highlighted)
        if as_json:
            return text_object(line, result)
        return one_line(result.text or "") if aside or highlighted is None else highlighted

    return output_line


def one_line(text: str) -> str:
    r"""Line breaks become the two characters `\n`."""
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("\n", r"\n")


def text_object(line: Line, result: Result) -> str:
    """The line for a result with `--json`."""
    record: dict[str, Any] = {
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "stats": asdict(result.stats),
    }
    optional = {"score": result.score, "error": result.error}
    record |= {name: value for name, value in optional.items() if value is not None}
    if hasattr(result.stats, "pieces"):  # the prompt was a document that was split
        record["pieces"] = [
            {name: value for name, value in vars(piece).items() if value is not None}
            for piece in result.pieces
        ]
    return _json(line, record, allow_nan=True)


def score_object(line: Line, score: Score) -> str:
    record: dict[str, Any] = {"target": line.target or ""}
    record |= {name: getattr(score, name) for name in ("logprob", "token_logprobs", "tokens")}
    if score.error:
        record |= {"logprob": None, "error": score.error}
    return _json(line, record)


def embedding_object(line: Line, vector: np.ndarray | Exception) -> str:
    if isinstance(vector, Exception):
        return _json(line, {"embedding": None, "error": str(vector)})
    return _json(line, {"embedding": [float(str(number)) for number in vector]})


def _json(line: Line, record: Mapping[str, Any], allow_nan: bool = False) -> str:
    """A result as JSON: after its prompt, the further fields of the input's object."""
    fields = {"prompt": line.text}
    fields |= {name: value for name, value in line.fields.items() if name not in OF_RESULTS}
    return json.dumps({**fields, **record}, ensure_ascii=False, allow_nan=allow_nan)


def error_of(outcome: Any) -> str | None:
    """The error message of an outcome, or of a document's failed pieces; else None."""
    pieces = getattr(outcome, "pieces", [])
    if failed := [piece for piece in pieces if piece.error]:
        where = f"the first, at character {failed[0].start + 1}: {failed[0].error}"
        return f"{len(failed)} of {len(pieces)} pieces stand as they were; {where}"
    return str(outcome) if isinstance(outcome, Exception) else getattr(outcome, "error", None)


def summary(
    stats: Stats,
    results: int,
    seconds: float,
    unit: str = "prompts",
    texts: bool = True,
    cut_off: int = 0,
) -> str:
    """Summarizes results in one line.

    Args:
        stats: the sums of the results' statistics.
        results: number of results.
        seconds: the time that all results took, without waiting for a pipe or a terminal.
        unit: plural name of the results.
        texts: whether the results are texts, not scores or vectors.
        cut_off: number of texts, or of pieces of documents, that reached max_tokens.
    """
    parts, seconds = [], max(seconds, 1e-9)
    if not texts:
        parts.append(f"{results} {'prompt' if results == 1 else 'prompts'} in {seconds:.2f} s")
        parts.append(f"{results / seconds:.1f} prompts/s")
    else:
        parts += [f"{results} {unit}"] if results > 1 else []
        pieces = getattr(stats, "pieces", 0)  # of documents
        if pieces:
            counts = {name: getattr(stats, name) for name in ("cut", "looped", "failed", "kept")}
            named = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
            noun = "piece" if pieces == 1 else "pieces"
            parts.append(f"{pieces} {noun}{f' ({named})' if named else ''}")
        decoded = stats.generated_tokens - stats.reused_tokens
        parts.append(f"{decoded} tokens in {seconds:.2f} s")
        parts.append(f"{decoded / seconds:.1f} tokens/s")
        if cut_off:
            parts.append(f"cut off by --max-tokens: {cut_off}")
        parts += [f"{stats.reused} reused"] if stats.reused else []
    if stats.drafted:
        accepted = f"{stats.accepted} of {stats.drafted} drafted"
        parts.append(f"acceptance {stats.acceptance_rate:.0%} ({accepted})")
    if copied := stats.speculation.copied_accepted:
        parts.append(f"accepted copies: {copied}")
    if stats.target_calls:
        parts.append(f"{stats.tokens_per_call:.2f} tokens per target call")
    if stats.peak_memory_bytes:
        parts.append(f"peak memory {readable(stats.peak_memory_bytes)}")
    return " · ".join(parts)


# ---- files ---------------------------------------------------------------------------------------


def check_output_file(output_file: str, input_file: str | None, whole: bool = False) -> None:
    """Checks, before the work begins, that results can be written to this file.

    Args:
        output_file: the file.
        input_file: the file with the prompts, if there is one.
        whole: whether the file is written beside its name first.
    """
    path = Path(output_file)
    if path.is_dir():
        raise UserError(f"{output_file} is a folder; name a file for the results")
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent} for {path.name}; make it first")
    places = [path if path.exists() else path.parent, *([path.resolve().parent] if whole else [])]
    if not all(os.access(place, os.W_OK) for place in places):
        raise UserError(f"{output_file} may not be written; choose another place")
    if input_file not in (None, "-") and path.exists() and path.samefile(input_file):
        raise UserError(f"{output_file} is the input file too; give the results another name")
    if output_file.endswith(ARRAY) and path.exists() and not path.is_file():
        raise UserError(f"{output_file} is a pipe or a device; name a file, or write JSON lines")


def open_output(
    options: MainOptions, keep: int, highlighter: TokenHighlighter | None
) -> LineFile | ArrayFile:
    """The output of several results; `keep` is as in `LineFile`, the rest as in `text_lines`."""
    path = options.output_file
    if options.embed and path and path.endswith(ARRAY):
        return ArrayFile(path)
    line_of = text_lines(options.json, bool(path) or options.json, highlighter)
    if not options.writes_text:
        line_of = score_object if options.score else embedding_object
    return LineFile(path, keep, line_of, whole=options.is_output_whole)


class LineFile(contextlib.AbstractContextManager["LineFile"]):
    """Writes lines of results, each without delay, so that an interruption loses none.

    Args:
        path: the file to write; an existing file is not changed before the first result. None:
            standard output.
        keep: number of bytes at the beginning of an existing file to keep, with earlier results.
        line_of: makes a line from a prompt and its outcome.
        whole: whether the lines are written into a partial file, which replaces `path` when the
            block ends without an exception.
    """

    def __init__(
        self, path: str | None, keep: int = 0, line_of: LineOf = text_object, whole: bool = False
    ):
        self._path, self._keep, self._line_of = path, keep, line_of
        self._file: TextIO | None = None if path else sys.stdout
        self._partial = partial_file(path) if path and whole else None

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        if not self._path or not self._file:
            return
        ignored = (OSError,) if kind else ()  # after a failed write, closing the file fails again
        with contextlib.suppress(*ignored), self._file:  # it stays locked until it has its name
            if self._partial and kind:
                log(UNFINISHED.format(self._partial))
            elif self._partial:
                try:
                    put_in_place(self._partial, self._path)
                except OSError as error:
                    cause = f"cannot rename {self._partial}: {error.strerror}"
                    raise UserError(f"{cause}; copy it to another place") from None

    def write(self, line: Line, outcome: Any) -> None:
        self.write_text(self._line_of(line, outcome) + "\n")

    def write_text(self, text: str) -> None:
        try:
            if self._path and not self._file:
                self._file = self._opened(self._partial or self._path)
            print(text, end="", file=self._file, flush=True)
            removed = self._path and self._file and not os.fstat(self._file.fileno()).st_nlink
        except BrokenPipeError:  # the reader of our output has stopped
            raise
        except OSError as error:
            cause = f"cannot write {self._path or 'standard output'}: {error.strerror or error}"
            cure = "make room, or " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
            raise UserError(f"{cause}; {cure}name another --output-file") from None
        if removed:
            raise UserError(f"{self._path} was removed while it was written; start again")

    def _opened(self, path: str | Path) -> TextIO:
        """Opens and locks the file, and drops what follows the results to keep."""
        file = open(path, "a", encoding="utf-8", errors="backslashreplace")
        status, cause = os.fstat(file.fileno()), ""
        if not stat.S_ISREG(status.st_mode):  # a pipe or a device
            return file
        if not lock(file.fileno()):
            cause = "is being written by another process; wait for it"
        elif os.fstat(file.fileno()).st_size < self._keep:
            cause = "has become shorter since it was read; start again"
        if cause:
            file.close()
            raise UserError(f"{self._path} {cause}")
        file.truncate(self._keep)
        return file


class ArrayFile(contextlib.AbstractContextManager["ArrayFile"]):
    """Collects vectors, and writes them as a float32 array for numpy.load when its block ends.

    Without any vector, no file is written, and after an exception only the partial one. A prompt
    that cannot be embedded gets a row of NaN, so that row i belongs to line i of the input.
    """

    def __init__(self, path: str):
        self._path, self._rows = path, list[Any]()  # a vector each, or None

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        import numpy as np  # late, as `--help` does not need it

        vectors = [row for row in self._rows if row is not None]
        if not vectors:
            return
        missing = np.full_like(vectors[0], np.nan)
        array = np.stack([missing if row is None else row for row in self._rows])
        path = partial_file(self._path) if kind else Path(self._path)
        replace_file(path, lambda file: np.save(file, array), "start again")
        if kind:
            log(UNFINISHED.format(path))

    def write(self, line: Line, outcome: np.ndarray | Exception) -> None:
        self._rows.append(None if isinstance(outcome, Exception) else outcome)
