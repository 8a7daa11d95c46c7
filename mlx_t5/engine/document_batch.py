"""Decodes documents: cuts them into pieces, decodes the pieces as prompts, and joins the texts.

All pieces share a batch, even if they belong to different documents. A document is cut when its
first piece is needed. The engine does not know about documents.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, islice, repeat, zip_longest
from typing import TYPE_CHECKING, Any

from mlx_t5.engine.codec import Job
from mlx_t5.engine.rows import Chunk, PieceResult, Result, Speculation, Stats
from mlx_t5.errors import UserError, log, shown
from mlx_t5.settings import DEFAULT_BATCH_SIZE, is_listlike
from mlx_t5.text.detokenizer import StreamingDetokenizer
from mlx_t5.text.documents import Cutting, Document
from mlx_t5.text.tokenizer import encode

if TYPE_CHECKING:
    from mlx_t5.decoder import SpeculativeDecoder

END = object()  # ends no iterator
DOUBTFUL = 'note: "{}" is decoded as text; if it is a prefix, give it by --prefix (Python: prefix=)'


@dataclass
class DocumentStats(Stats):
    """Sums of the pieces' statistics, and rates from these sums; peak memory is the maximum."""

    pieces: int = 0
    cut: int = 0  # parts of sentences that were too long
    failed: int = 0  # the result has their source text
    kept: int = 0  # likewise, because the answers lacked a URL or an e-mail address of the source

    def add(self, stats: Stats) -> None:
        decided = sum(one.tokens_per_call * one.target_calls for one in (self, stats))
        peak = max(self.peak_memory_bytes, stats.peak_memory_bytes)
        _add(self, stats)
        self.peak_memory_bytes = peak
        self.update_rates(self.generated_tokens, decided)


def _add(sums: Any, more: Any) -> None:
    """Adds each field of `more` to the same field of `sums`; adds lists position by position."""
    for name, added in vars(more).items():
        value = getattr(sums, name)
        if isinstance(value, Speculation):
            _add(value, added)
        elif isinstance(value, list):
            setattr(sums, name, [a + b for a, b in zip_longest(value, added, fillvalue=0)])
        else:
            setattr(sums, name, value + added)


class DocumentInFlight:
    """A document that is being decoded, with the results of its pieces so far.

    Attributes:
        document: the document, or the error that reading the document raised.
        prompts: the prompts of all its pieces.
        result: the document's result, which is complete after `finish`.
    """

    def __init__(self, document: Document | Exception, most: int | None = None) -> None:
        """Cuts the document, into `most` pieces at most."""
        self.document, self.prompts = document, list[str]()
        if isinstance(document, Document):
            self.prompts = [document.prompt(piece) for piece in islice(document.cut(), most)]
        self.stats, self._texts, self._pieces = DocumentStats(), [""], list[str]()
        self.result = Result(None, [], [], "stop", self.stats)

    @property
    def complete(self) -> bool:
        """Whether the results of all pieces have been added."""
        return len(self.result.pieces) == len(self.prompts)

    def add(self, answer: Result) -> str:
        """Adds the next piece's result; returns the text to append to the document's text."""
        assert isinstance(self.document, Document), "there is no piece of an error"
        i, result, stats = len(self.result.pieces), self.result, self.stats
        piece, reason = self.document.pieces[i], answer.finish_reason
        kept = not answer.error and self.document.loses_address(piece, answer.text or "")
        text = self.document.answered(piece, None if answer.error or kept else answer.text)
        result.pieces.append(PieceResult(piece.start, piece.end, text, reason, answer.error))
        result.tokens += answer.tokens
        result.writers += answer.writers
        result.finish_reason = "length" if reason == "length" else result.finish_reason
        stats.add(answer.stats)
        stats.pieces, stats.cut = stats.pieces + 1, stats.cut + piece.cut
        stats.failed, stats.kept = stats.failed + (answer.error is not None), stats.kept + kept
        self._pieces.append(text)
        self._texts.append(self.document.part(i, self._pieces))
        return self._texts[-1]

    def finish(self) -> str:
        """Completes the result; returns the source text that follows the last piece."""
        result, rest = self.result, ""
        if isinstance(self.document, Document):
            rest = self.document.before(len(result.pieces))
            result.text = "".join([*self._texts, rest])
            all_failed = 0 < len(result.pieces) == self.stats.failed
            result.error = result.pieces[0].error if all_failed else None
        else:
            result.error = str(self.document)
        result.finish_reason = "error" if result.error else result.finish_reason
        return rest


def chunks(
    decoder: SpeculativeDecoder,
    prompts: Iterable[Any],
    job: Job,
    batch_size: int = DEFAULT_BATCH_SIZE,
    ready: Callable[[], bool] = lambda: True,
    indexes: Iterable[int] | None = None,
) -> Generator[Chunk, None, None]:
    """Decodes documents in order, and yields a chunk per piece; a document's last has its result.

    As `SpeculativeDecoder.results`, but with one seed, an index per document, and no predictions.

    Raises:
        UserError: the model has no tokenizer, or the job has several seeds or texts per prompt.
    """
    if decoder.tokenizer is None:
        raise UserError("a split needs a tokenizer; this model folder has none")
    if is_listlike(job.seed):
        raise UserError("a list of seeds cannot be combined with split")
    sequences = job.settings.num_return_sequences
    for name, number in {"num_samples": job.num_samples, "num_return_sequences": sequences}.items():
        if number != 1:
            raise UserError(f"{name} cannot be combined with split")
    in_hand, doubtful = deque[DocumentInFlight](), ""
    # Pieces not drawn yet, their indexes and their predictions.
    pending, streams, expected = deque[str](), deque[int](), deque[Any]()

    def drawn() -> Iterator[str]:
        nonlocal doubtful
        predictions = chain(job.predictions, repeat(None))
        numbered = zip(prompts, count() if indexes is None else indexes, predictions, strict=False)
        for prompt, index, predicted in numbered:
            document = _document(prompt, predicted, job, decoder)
            if not doubtful and (doubtful := getattr(document, "doubtful", "")):
                log(DOUBTFUL.format(shown(doubtful)))
            in_hand.append(DocumentInFlight(document))
            pending.extend(in_hand[-1].prompts)
            streams.extend(index + (i << 32) for i in range(len(pending)))
            expected.extend([predicted] if len(pending) == 1 else [None] * len(pending))
            while pending:
                yield pending.popleft()

    def finished(text: str = "", answer: Result | None = None) -> Iterator[Chunk]:
        while (complete := bool(in_hand) and in_hand[0].complete) or answer:
            text += in_hand[0].finish() if complete else ""
            tokens, writers = (answer.tokens, answer.writers) if answer else ([], [])
            result = in_hand[0].result if complete else None
            yield Chunk(text, tokens, writers, [""] * len(tokens), in_hand[0].stats, result)
            text, answer = "", None
            if complete:
                in_hand.popleft()

    # Pieces are not cut again.
    of_pieces = replace(job, cutting=None, target_language="", predictions=(), stream=False)
    ready_or_pending = lambda: bool(pending) or ready()  # noqa: E731
    more = iter(streams.popleft, None), iter(expected.popleft, END)
    for answer in decoder.results(drawn(), of_pieces, batch_size, ready_or_pending, *more):
        yield from finished()
        yield from finished(in_hand[0].add(answer), answer)
    yield from finished()


def results(*args: Any) -> Iterator[Result]:
    return (chunk.result for chunk in chunks(*args) if chunk.result)


def stream(
    decoder: SpeculativeDecoder, prompt: Any, job: Job, batch_size: int
) -> Generator[Chunk, None, None]:
    """Decodes one document as `chunks` does, but raises its error if it fails as a whole."""
    for chunk in chunks(decoder, [prompt], job, batch_size):
        if chunk.result and chunk.result.error:
            raise UserError(chunk.result.error)
        yield spelled(chunk, decoder.tokenizer)


def spelled(chunk: Chunk, tokenizer: Any) -> Chunk:
    """Sets a chunk's `pieces` to the texts of its tokens, if these make up the chunk's text."""
    detokenizer = StreamingDetokenizer(tokenizer)
    pieces = [*map(detokenizer.add, chunk.tokens)]
    before = chunk.text.find("".join(pieces))  # -1 if, say, the text was broken into lines
    if pieces and before >= 0:
        chunk.pieces = [chunk.text[:before] + pieces[0], *pieces[1:]]
    return chunk


def _document(
    prompt: Any, prediction: Any, job: Job, decoder: SpeculativeDecoder
) -> Document | Exception:
    """Returns a document whose pieces fit the model, or an error if the text is unusable."""
    if isinstance(prompt, Exception):
        return prompt
    config, cutting = decoder.model.config, job.cutting or Cutting()
    if prediction is not None and not job.target_language:
        return UserError("prediction cannot be combined with split")
    try:
        if prediction is not None:  # of the whole text, so that is not cut
            cutting = replace(cutting, split="none")
        return fitted_document(
            prompt, cutting, decoder.tokenizer, config.n_positions, config.task_prefixes
        )
    except UserError as error:
        return error


def fitted_document(
    text: str, cutting: Cutting, tokenizer: Any, limit: int | None, prefixes: Sequence[str]
) -> Document:
    """Returns a document whose prompts have at most `limit` tokens."""

    def tokens(prompt: str) -> int:
        try:
            return len(encode(tokenizer, prompt))
        except UserError:  # decoding the piece will report it
            return 0

    return Document(text, cutting, tokens, limit, prefixes)
