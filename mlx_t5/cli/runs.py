"""A run of main.py over several prompts: which of them remain, and what an earlier run has written.

`--resume` keeps the complete lines of an interrupted output. Lines of text are kept whatever wrote
them; JSON lines must have the prompts of the input.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from tqdm import tqdm

from mlx_t5.cli.generate_options import MainOptions
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.engine.codec import Job
from mlx_t5.errors import UserError, log
from mlx_t5.text.tokenizer import encode

# Computes outcomes from prompts, their indexes, and a test of whether the next prompt is ready.
Compute = Callable[[Iterator[Any], Iterator[int], Callable[[], bool]], Iterator[Any]]

OTHERWISE = "name another --output-file, or leave --resume out to start again"


class ResumePoint(NamedTuple):
    """The part of an output that is kept: its number of prompts, and its size in bytes."""

    prompts: int = 0
    size: int = 0


class Run:
    """The prompts that remain to be done, and the output of those that an earlier run has done.

    Attributes:
        prompts: the remaining prompts: a list, or an iterator over the lines of an input file.
        count: number of all prompts, including those done; None if the number is not known.
        first: number of prompts already done.
        texts: number of outcomes per prompt; each outcome is one line.
        keep: number of bytes of earlier results in the output file.
    """

    def __init__(self, prompts: Any, options: MainOptions, job: Job) -> None:
        """With --resume, skips the finished prompts of an input's `Lines`."""
        self.prompts, self.texts = prompts, 1
        if options.writes_text:
            self.texts = job.num_samples * job.settings.num_return_sequences  # one of them is 1
        self.count = len(prompts) if isinstance(prompts, list) else prompts.count
        done = ResumePoint()
        if options.resume and options.output_file:
            text = "text" if options.json else None
            result = "logprob" if options.score else "embedding" if options.embed else text
            done = find_resume_point(options.output_file, prompts, self.texts, result, self.count)
        self.first, self.keep = done
        self._ready = getattr(prompts, "ready", lambda: True)

    def clock(self) -> float:
        """Elapsed time, not counting waits for input."""
        return time.perf_counter() - getattr(self.prompts, "waited", 0.0)

    def outcomes(self, compute: Compute) -> Iterator[tuple[int, Any, Any]]:
        """Yields, for each outcome in order, the prompt's number (from 1), the prompt, the outcome.

        Args:
            compute: a function that computes outcomes from two iterators. It must draw a prompt
                from the first, then its index from the second, and only then the next prompt.
        """
        in_hand: deque[tuple[int, Any]] = deque()

        def drawn() -> Iterator[Any]:
            for index, prompt in zip(count(self.first), self.prompts, strict=False):
                in_hand.append((index + 1, prompt))
                yield prompt

        def indexes() -> Iterator[int]:
            while True:
                yield in_hand[-1][0] - 1

        for done, outcome in enumerate(compute(drawn(), indexes(), self._ready), 1):
            yield *in_hand[0], outcome
            if done % self.texts == 0:
                in_hand.popleft()


def prefixed(prompts: Iterable[Any], prefix: str) -> Iterator[Any]:
    """Puts the prefix before each prompt, in a pair before its first text; passes errors on."""
    for prompt in prompts:
        if isinstance(prompt, tuple):
            yield prefix + prompt[0], prompt[1]
        else:
            yield prefix + prompt if isinstance(prompt, str) else prompt


def note_long(prompts: Iterable[Any], job: Job, decoder: SpeculativeDecoder) -> Iterator[Any]:
    """Passes prompts on; the first one longer than the model's n_positions gets a note.

    From then on, a terminal shows how far encoding is. Documents are cut into pieces that fit.
    """
    cuts = job.cutting or decoder.model.pooling.max_tokens  # texts, or what is embedded
    limit = decoder.model.config.n_positions if decoder.tokenizer and not cuts else None
    for prompt in prompts:
        text = prompt[0] if isinstance(prompt, tuple) else prompt
        # A text of fewer bytes has fewer tokens, so it need not be tokenized here.
        if limit and isinstance(text, str) and len(text.encode()) >= limit:
            count = len(encode(decoder.tokenizer, text))
            if count > limit:
                long = f"{count:,} tokens, more than the model's n_positions ({limit})"
                log(f"note: a prompt has {long}; encoding takes long, and the text may be poor")
                limit = None
                if sys.stderr.isatty():
                    bar = partial(tqdm, desc="encoding", unit=" layers", leave=False)
                    decoder.model.progress = bar
        yield prompt


def unpaired(items: Iterable[Any]) -> tuple[Iterator[Any], Iterator[Any]]:
    """An iterator over prompts, and one over their predictions (None: no prediction)."""
    predictions = deque[Any]()

    def prompts() -> Iterator[Any]:
        for item in items:
            prompt, prediction = item if isinstance(item, tuple) else (item, None)
            predictions.append(prediction)
            yield prompt

    return prompts(), iter(predictions.popleft, deque)  # a class is not a prediction


def find_resume_point(
    output_file: str,
    items: Iterator[Any],
    texts: int = 1,
    result: str | None = None,
    count: int | None = None,
) -> ResumePoint:
    """The finished part of an output; advances `items` past the finished prompts.

    Args:
        output_file: the output of an earlier run; it may not exist.
        items: the input's items; each is a text, a pair, or the `UserError` of an unusable line.
        texts: lines per prompt.
        result: the JSON field with the result; None if the lines are texts.
        count: number of items, if it is known.

    Raises:
        UserError: the output has results of other prompts, or of more prompts than the input.
    """
    prompts = size = 0
    try:
        if not stat.S_ISREG(os.stat(output_file).st_mode):  # a pipe or /dev/full never ends
            raise UserError(f"--resume needs a regular file, which {output_file} is not")
        with open(output_file, "rb") as file:
            while True:
                lines = [file.readline() for _ in range(texts)]
                complete = lines[-1].endswith(b"\n")
                item = next(items, None) if complete else None
                if item is None and (complete or (prompts == count and file.tell() > size)):
                    more = f"{output_file} has results of more prompts than the input"
                    raise UserError(f"{more}, which has {prompts}; {OTHERWISE}")
                if not complete:
                    return ResumePoint(prompts, size)
                for i, line in enumerate(lines if result else (), 1):
                    _check(line, item, str(result), f"{output_file} line {prompts * texts + i}")
                prompts, size = prompts + 1, file.tell()
    except FileNotFoundError:
        return ResumePoint()


def _check(line: bytes, item: Any, result: str, where: str) -> None:
    """Refuses a JSON line without a result, or of another prompt."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or result not in record:
        raise UserError(f"{where} is not an object with {result!r}; {OTHERWISE}")
    names = ("prompt", "target") if result == "logprob" else ("prompt",)
    for name, text in zip(names, item if isinstance(item, tuple) else (item,), strict=False):
        if record.get(name) != ("" if isinstance(text, UserError) else text):
            raise UserError(f"{where} has another {name} than the input; {OTHERWISE}")
