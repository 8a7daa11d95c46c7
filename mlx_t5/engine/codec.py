"""Converts what callers give into rows of token ids, and rows into results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

from mlx_t5.backend import mx
from mlx_t5.drafting.source_copy import count_predicted
from mlx_t5.engine.rows import Chunk, Result, Row
from mlx_t5.errors import UserError
from mlx_t5.sampling.beam_search import texts_of
from mlx_t5.sampling.draws import random_keys
from mlx_t5.settings import Settings
from mlx_t5.text.detokenizer import decode
from mlx_t5.text.prompts import checked_prompts, checked_samples, token_ids
from mlx_t5.text.stop_strings import TextWatch

CHARACTERS = 64  # of a prediction that are read at most, for each token that a text may have


class Codec:
    """Prompts to rows, and rows to results."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        """Takes the target's tokenizer and its number of token ids.

        Args:
            tokenizer: as `model.load` returns it; None if prompts are token ids.
            vocab_size: V.
        """
        self.tokenizer, self.vocab_size = tokenizer, vocab_size

    def settings(self, defaults: Settings, **given: Any) -> Settings:
        """The settings of a call.

        Args:
            defaults: what was not given.
            **given: any of `Settings`; a num_draft of None was not given.

        Raises:
            UserError: a value is out of range, or there is no tokenizer for it.
        """
        if given.get("num_draft") is None:
            given["num_draft"] = defaults.num_draft
        settings = replace(defaults, **given)
        if settings.stop and self.tokenizer is None:
            raise UserError("stop strings need a tokenizer; this model folder has none")
        if settings.top_k >= self.vocab_size:
            return replace(settings, top_k=0)  # no token is left out
        return settings

    def rows_of_all(
        self,
        prompts: Iterable[str | Sequence[int] | Exception],
        settings: Settings,
        seed: int | Sequence[int],
        num_samples: int,
        indexes: Iterable[int] | None = None,
        predictions: Iterable[str | Sequence[int] | None] | None = None,
    ) -> Iterator[Row]:
        """`rows` of prompts that are drawn as they are needed; arguments as of `results`.

        Raises:
            UserError: the prompts are no iterable, or seeds or samples are not what they can be.
        """
        samples = checked_samples(num_samples, settings.temp)
        prompts, seed = checked_prompts(prompts, seed)
        given = chain(predictions or (), repeat(None))
        each = zip(prompts, given, random_keys(seed, samples, indexes), strict=False)
        return chain.from_iterable(
            self.rows(prompt, settings, keys, prediction=predicted)
            for prompt, predicted, keys in each
        )

    def rows(
        self,
        prompt: str | Sequence[int] | Exception,
        settings: Settings,
        keys: Iterable[mx.array],
        watched: bool = False,
        prediction: str | Sequence[int] | None = None,
    ) -> Iterator[Row]:
        """Turns a prompt into a row for each key, finished by `error` if it cannot be used.

        The prompt is read once, and each row is made when it is asked for.

        Args:
            prompt: a text, token ids, or what is wrong with it.
            settings: of every row.
            keys: (2,) each, as `draws.random_keys` makes them.
            watched: whether the text is to be read while it grows, for `chunk`.
            prediction: what the text is expected to be, as text or token ids; None for nothing.
        """
        ids: list[int] = []
        predicted: list[int] = []
        bad: Exception | None = None
        if isinstance(prompt, Exception):
            bad = prompt
        else:
            try:
                ids = token_ids(prompt, self.tokenizer, self.vocab_size)
                predicted = [] if prediction is None else self._predicted(prediction, settings)
            except UserError as error:
                bad = error
        for row in (Row(ids, settings, key) for key in keys):
            if bad:
                row.fail(str(bad))
            else:
                row.prediction = predicted
                if settings.stop or (watched and self.tokenizer):
                    row.watch = TextWatch(self.tokenizer, tuple(settings.stop))
            yield row

    def _predicted(self, prediction: str | Sequence[int], settings: Settings) -> list[int]:
        if settings.num_beams > 1:
            beams = f"num_beams is {settings.num_beams}"
            raise UserError(f"{beams}: beams take no proposals; leave the prediction out")
        if isinstance(prediction, str):
            prediction = prediction[: settings.max_tokens * CHARACTERS]
        return token_ids(prediction, self.tokenizer, self.vocab_size, "prediction")

    def chunk(self, row: Row, seen: int) -> Chunk:
        """Returns what a row has gained since `seen` tokens, with its result if it is done."""
        tokens, writers = row.output(seen)
        pieces = row.watch.pieces[seen:] if row.watch else []
        text = "".join(pieces) + (row.watch.rest if row.watch else "")
        result = self.result(row) if row.finish_reason else None
        row.stats.update_rates(row.decided - row.ended, row.decided)
        return Chunk(text, tokens, writers, pieces, row.stats, result)

    def results(self, row: Row) -> list[Result]:
        """Returns the results of a finished row: one, or as many of its search as are wanted."""
        texts = texts_of(row) if row.settings.num_beams > 1 else [row]
        return [self.result(text) for text in texts]

    def result(self, row: Row) -> Result:
        """Returns the result of a finished row."""
        if row.error:
            return Result(None, [], [], "error", row.stats, row.error)
        tokens, writers = row.output()
        row.stats.update_rates(len(tokens), row.decided)
        row.stats.peak_memory_bytes = mx.get_peak_memory()
        if row.prediction:
            end, speculation = getattr(self.tokenizer, "eos_token_id", None), row.stats.speculation
            expected = [token for token in row.prediction if token != end]
            counts = count_predicted(expected, tokens)
            speculation.predicted, speculation.predicted_accepted = counts
        text = None
        if row.watch:
            text = row.watch.text
        elif self.tokenizer:
            text = decode(self.tokenizer, tokens)
        assert row.finish_reason is not None, "the row is still running"
        return Result(text, tokens, writers, row.finish_reason, row.stats, score=row.score)
