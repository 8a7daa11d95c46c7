"""A request (how prompts are decoded, and what is reported), and the rows of its prompts."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from mlx_t5.engine.rows import Row
from mlx_t5.errors import UserError
from mlx_t5.sampling.draws import PART, fold, row_key
from mlx_t5.settings import Settings
from mlx_t5.text.detokenizer import TextWatch, decode
from mlx_t5.text.prompts import DocumentOptions, Prompt, token_ids
from mlx_t5.text.repetition import most_copies

CHARACTERS = 64  # characters of a prediction that are read at most, per token of max_tokens


@dataclass(frozen=True, eq=False)
class GenerationRequest:
    """How prompts are decoded, and what kind of answer they get.

    Attributes:
        settings: the settings of every text.
        seed: with it, prompt i uses the random stream i, unless the prompt has its own seed.
        num_samples: texts per prompt; each text has its own random stream.
        document: how texts are cut into pieces, and the prefix of every text.
        stream: whether a text is answered in chunks while it grows.
        by_token: whether `Chunk.segments` has the text of each token, even without a stream.
        logprobs: how many likeliest tokens are reported with each token; None reports nothing.
        reuse: whether prompts with equal tokens are decoded once, if they are greedy.
    """

    settings: Settings
    seed: int = 0
    num_samples: int = 1
    document: DocumentOptions = DocumentOptions()
    stream: bool = False
    by_token: bool = False
    logprobs: int | None = None
    reuse: bool = True

    def rows(self, prompt: Prompt, tokenizer: Any, vocab_size: int) -> Iterator[Row]:
        """Yields a row for each sample of a prompt that is not cut.

        The rows of an unusable prompt are finished with "error" already. Without a tokenizer, the
        prompt must be token ids.
        """
        settings, source, prefix = self.settings, prompt.source, self.document.prefix
        if settings.stop and tokenizer is None:
            raise UserError("stop strings need a tokenizer; add one to the model folder")
        ids, predicted, error = list[int](), list[int](), ""
        # An empty line is translated by an empty one.
        nothing = self.document.target_language and source == ""
        try:
            if prefix and not isinstance(source, (str, Exception)):
                raise UserError("a prefix needs a text, not token ids")
            if prefix and isinstance(source, str) and source.strip():
                source = prefix + source
            ids = token_ids(replace(prompt, source=source), tokenizer, vocab_size)
            if prompt.prediction is not None:
                if settings.num_beams > 1:
                    raise UserError("num_beams cannot be combined with prediction")
                expected = prompt.prediction
                if isinstance(expected, str):
                    expected = expected[: settings.max_tokens * CHARACTERS]
                predicted = token_ids(expected, tokenizer, vocab_size, "prediction")
        except UserError as bad:
            error = str(bad)
        detection = settings.repetition_detection
        loops = detection.max_pattern_size > 0
        if loops and ids and (prompt.prefix is not None or self.document.target_language):
            # Only what repeats more often than anything in the source is a loop.
            text = prompt.words if isinstance(source, str) else decode(tokenizer, ids)
            copies = max(detection.min_count, most_copies(text) + 1)
            detection = replace(detection, min_count=copies)
            settings = replace(settings, repetition_detection=detection)
        detailed = self.by_token or self.logprobs is not None
        answer_key = None
        # Equal prompts have the same text if it does not depend on what was proposed, as it does
        # with delta above 0, and if nobody asks how it was decoded.
        greedy = settings.temp == 0 and settings.delta == 0 and settings.num_beams == 1
        if self.reuse and greedy and not detailed and not settings.logits_processors:
            # A prediction does not change the text, but the number of accepted proposals.
            answer_key = array("i", [*ids, -1, *predicted]).tobytes(), settings
        seed = self.seed if prompt.seed is None else prompt.seed
        first = prompt.index * self.num_samples  # of the random streams
        for stream in range(first, first + self.num_samples):
            key = row_key(seed, stream) if settings.temp > 0 else None
            for number in prompt.parts if key is not None else ():
                key = fold(key, number, PART)
            row = Row(ids, settings, key, tokenizer, prediction=predicted)
            if prompt.prefix is not None:
                row.piece = prompt, lambda part: next(self.rows(part, tokenizer, vocab_size))
            if nothing:
                row.finish_reason = "stop"
            elif error:
                row.fail(error)
            else:
                row.answer_key = answer_key
                if settings.stop or (tokenizer is not None and (self.stream or detailed)):
                    row.watch = TextWatch(tokenizer, tuple(settings.stop))
            yield row
