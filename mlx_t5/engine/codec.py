"""A job (what a caller asks), its rows of token ids, and their results."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
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
from mlx_t5.text.documents import Cutting
from mlx_t5.text.languages import Translations
from mlx_t5.text.prompts import checked_prompts, checked_samples, token_ids
from mlx_t5.text.stop_strings import TextWatch

CHARACTERS = 64  # characters of a prediction that are read at most, per token of max_tokens


@dataclass(frozen=True, eq=False)
class Job:
    """How the prompts of a call are decoded, and what kind of answer they get.

    Attributes:
        settings: the settings of every text.
        seed: one seed, from which prompt i gets the random stream i, or a list with a seed per
            prompt.
        num_samples: texts per prompt; each text has its own random stream.
        cutting: how texts are cut into pieces; None if each prompt is decoded as a whole.
        predictions: the expected output of each prompt, or None; the last ones may be missing.
        stream: whether a text is answered in chunks while it grows.
        by_token: whether `Chunk.pieces` has the text of each token, even without a stream.
        logprobs: how many likeliest tokens are reported with each token; None reports nothing.
        reuse: whether prompts with equal tokens are decoded once, if they are greedy.
        prefix: text put before every prompt that is not cut.
        target_language: code of the language into which texts are translated; the model's prefix
            for it replaces `prefix`, or that of `cutting`.
        source_language: code of the texts' language, if the model must know it.
    """

    settings: Settings
    seed: int | Sequence[int] = 0
    num_samples: int = 1
    cutting: Cutting | None = None
    predictions: Iterable[str | Sequence[int] | None] = ()
    stream: bool = False
    by_token: bool = False
    logprobs: int | None = None
    reuse: bool = True
    prefix: str = ""
    target_language: str = ""
    source_language: str = ""

    @property
    def watched(self) -> bool:
        """Whether tokens have to be converted to text while the text grows."""
        return self.stream or self.by_token or self.logprobs is not None

    @property
    def shareable(self) -> bool:
        """Whether equal prompts have the same answer, so that it can be reused."""
        settings = self.settings
        # With delta above 0, the text depends on what was proposed, for example on a prediction.
        greedy = settings.temp == 0 and settings.delta == 0 and settings.num_beams == 1
        details = self.by_token or self.logprobs is not None  # of how the text was decoded
        return self.reuse and greedy and not details and not settings.logits_processors

    @classmethod
    def of(
        cls, defaults: Settings, values: dict[str, Any], num_samples: int = 1, **attributes: Any
    ) -> Job:
        """The job of a call; `values` are fields of `Settings` and `Cutting` by name.

        With `target_language`, each text is cut into sentences, unless several texts per prompt or
        a prediction need it whole.
        """
        names = {field.name for field in fields(Cutting)}
        values = dict(values)
        if target := values.pop("target_language", ""):
            source = values.pop("source_language", "")
            attributes |= {"target_language": target, "source_language": source}
            if "prefix" in values:
                raise UserError("prefix cannot be combined with target_language")
            predicted = any(one is not None for one in attributes.get("predictions", ()))
            several = num_samples > 1 or values.get("num_return_sequences", 1) != 1
            values.setdefault("split", "none" if predicted or several else "sentences")
        cuts = {name: values.pop(name) for name in [*values] if name in names}
        cutting = Cutting(**cuts)
        if cutting.split == "none" and cutting != Cutting():
            raise UserError(f"{[*cuts][-1]} requires split")
        if unknown := [*values.keys() - {field.name for field in fields(Settings)}]:
            call = "stream" if attributes.get("stream") else "generate"
            raise TypeError(f"{call}() got an unexpected keyword argument {unknown[0]!r}")
        if values.get("num_draft") is None:
            values["num_draft"] = defaults.num_draft
        settings = replace(defaults, **values)
        samples = checked_samples(num_samples, settings.temp)
        whole = cutting.split == "none"
        return cls(settings, num_samples=samples, cutting=None if whole else cutting, **attributes)

    def translating(self, translations: Translations) -> Job:
        """This job with the prefix for its languages."""
        prefix, source = translations.prefix(self.target_language, self.source_language)
        if self.cutting is None:
            return replace(self, prefix=prefix)
        return replace(self, cutting=replace(self.cutting, prefix=prefix, source_language=source))


class Codec:
    """Makes rows from prompts, and results from rows; no tokenizer: prompts are token ids."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self.tokenizer, self.vocab_size = tokenizer, vocab_size

    def rows(
        self,
        prompts: Iterable[str | Sequence[int] | Exception],
        job: Job,
        indexes: Iterable[int] | None = None,
    ) -> Iterator[Row]:
        """Yields the rows of prompts, one per sample; reads the prompts lazily.

        The rows of an unusable prompt are finished with "error" already.
        """
        if job.settings.stop and self.tokenizer is None:
            raise UserError("stop strings need a tokenizer; this model folder has none")
        prompts, seed = checked_prompts(prompts, job.seed)
        predictions = chain(job.predictions, repeat(None))
        keys_of_prompts = random_keys(seed, job.num_samples, indexes)
        requests = zip(prompts, predictions, keys_of_prompts, strict=False)
        return chain.from_iterable(self._rows_of(job, *request) for request in requests)

    def _rows_of(
        self,
        job: Job,
        prompt: str | Sequence[int] | Exception,
        prediction: str | Sequence[int] | None,
        keys: Iterable[mx.array],
    ) -> Iterator[Row]:
        settings = job.settings
        ids, predicted, error = list[int](), list[int](), ""
        try:
            if isinstance(prompt, Exception):
                raise UserError(str(prompt))
            if job.prefix:
                if not isinstance(prompt, str):
                    raise UserError("a prefix needs a text, not token ids")
                prompt = job.prefix + prompt if prompt.strip() else prompt
            ids = token_ids(prompt, self.tokenizer, self.vocab_size)
            predicted = [] if prediction is None else self._predicted(prediction, settings)
        except UserError as bad:
            error = str(bad)
        # The prediction changes no text, but the number of proposals that are accepted.
        answer_key = array("i", [*ids, -1, *predicted]).tobytes(), settings
        for row in (Row(ids, settings, key) for key in keys):
            if error:
                row.fail(error)
            else:
                row.prediction, row.answer_key = predicted, answer_key if job.shareable else None
                if settings.stop or (job.watched and self.tokenizer):
                    row.watch = TextWatch(self.tokenizer, tuple(settings.stop))
            yield row

    def _predicted(self, prediction: str | Sequence[int], settings: Settings) -> list[int]:
        if settings.num_beams > 1:
            raise UserError("num_beams cannot be combined with prediction")
        if isinstance(prediction, str):
            prediction = prediction[: settings.max_tokens * CHARACTERS]
        return token_ids(prediction, self.tokenizer, self.vocab_size, "prediction")

    def chunk(self, row: Row) -> Chunk:
        """What a row has added since its last chunk, and a finished row's result."""
        tokens, writers = row.output(row.reported)
        pieces = row.watch.pieces[row.reported :] if row.watch else []
        text = "".join(pieces) + (row.watch.rest if row.watch else "")
        result = self.result(row) if row.finish_reason else None
        row.stats.update_rates(row.generated, row.decided)
        # If the end token alone released held-back text, its log-probability is reported.
        logprobs = row.logprobs[: len(tokens) or (1 if text else 0)]
        row.reported, row.logprobs = row.decided, []
        return Chunk(text, tokens, writers, pieces, row.stats, result, row.index, logprobs)

    def results(self, row: Row) -> list[Result]:
        """A finished row's results: one, or with beams `num_return_sequences`."""
        texts = texts_of(row) if row.settings.num_beams > 1 else [row]
        return [self.result(text) for text in texts]

    def result(self, row: Row) -> Result:
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
