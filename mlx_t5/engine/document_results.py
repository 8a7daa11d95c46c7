"""Documents: the rows of their pieces, and how the pieces' results are joined.

All pieces share a batch, even if they belong to different documents. A document is cut when its
first piece is needed. The engine does not know about documents.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from mlx_t5.checkpoints.config import T5Config
from mlx_t5.engine.generation_request import GenerationRequest
from mlx_t5.engine.rows import Chunk, PieceResult, Result, Row, Stats
from mlx_t5.errors import UserError, brief, log
from mlx_t5.text.detokenizer import StreamingDetokenizer
from mlx_t5.text.prompts import DocumentOptions, Prompt
from mlx_t5.text.tokenizer import encode

if TYPE_CHECKING:
    from mlx_t5.text.documents import Document

DOUBTFUL = 'note: "{}" is decoded as text; if it is a prefix, give it by --prefix (Python: prefix=)'


@dataclass
class DocumentStats(Stats):
    """Sums of the pieces' statistics, and rates from these sums; peak memory is the maximum."""

    pieces: int = 0
    length: int = 0  # those that reached max_tokens
    cut: int = 0  # parts of sentences that were too long
    looped: int = 0  # ran into a loop, and were decoded again in parts
    failed: int = 0  # the result has their source text
    kept: int = 0  # likewise, because the answers lacked a URL or an e-mail address of the source


class DocumentInFlight:
    """A document that is being decoded, with the results of its pieces so far.

    Attributes:
        document: the document, or the error that reading the document raised.
        prompts: the prompts of all its pieces.
        result: the document's result, which is complete after the last piece.
    """

    def __init__(
        self, document: Document | Exception, prompt: Prompt, most: int | None = None
    ) -> None:
        """Cuts the document, which was `prompt`, into `most` pieces at most."""
        self.document, self.prompts = document, list[Prompt]()
        self.stats, self._texts, self._pieces = DocumentStats(), [""], list[str]()
        self.result = Result(None, [], [], "stop", self.stats)
        if not isinstance(document, Exception):
            sources = [document.prompt(piece) for piece in islice(document.cut(), most)]
            predicted = prompt.prediction if len(sources) == 1 else None
            for i, source in enumerate(sources):
                # The first piece has the random stream of the whole text.
                index, seed = prompt.index + (i << 32), prompt.seed
                piece = Prompt(source, index, predicted, seed, prefix=document.prefix)
                self.prompts.append(piece)
        if not self.prompts:
            self._finish()

    @property
    def complete(self) -> bool:
        """Whether the results of all pieces have been added."""
        return len(self.result.pieces) == len(self.prompts)

    def add(self, answer: Result) -> Chunk:
        """Adds the next piece's result; returns what the document has with it.

        If there is no piece, the answer is ignored, and the chunk has the whole document.
        """
        result, stats = self.result, self.stats
        if not self.prompts:
            return Chunk(result.text or "", [], [], [], stats, result)
        assert not isinstance(self.document, Exception), "there is no piece of an error"
        i, reason = len(result.pieces), answer.finish_reason
        piece = self.document.pieces[i]
        kept = not answer.error and self.document.loses_address(piece, answer.text or "")
        text = self.document.answered(piece, None if answer.error or kept else answer.text)
        result.pieces.append(PieceResult(piece.start, piece.end, text, reason, answer.error))
        result.tokens += answer.tokens
        result.origins += answer.origins
        if reason == "length" or (reason == "repetition" and result.finish_reason == "stop"):
            result.finish_reason = reason
        if reason == "length":
            stats.length += 1
        stats.add(answer.stats)
        stats.pieces += 1
        if piece.cut:
            stats.cut += 1
        if answer.error:
            stats.failed += 1
        if kept:
            stats.kept += 1
        if answer.pieces or reason == "repetition":
            stats.looped += 1
            result.pieces[-1].looped = True
        self._pieces.append(text)
        self._texts.append(self.document.part(i, self._pieces))
        added = self._texts[-1]
        if self.complete:
            added += self._finish()
        whole = result if self.complete else None
        return Chunk(added, answer.tokens, answer.origins, [""] * len(answer.tokens), stats, whole)

    def _finish(self) -> str:
        """Completes the result; returns the source text that follows the last piece."""
        result, rest = self.result, ""
        if not isinstance(self.document, Exception):
            rest = self.document.before(len(result.pieces))
            result.text = "".join([*self._texts, rest])
            all_failed = 0 < len(result.pieces) == self.stats.failed
            result.error = result.pieces[0].error if all_failed else None
        else:
            result.error = str(self.document)
        result.finish_reason = "error" if result.error else result.finish_reason
        return rest


def rows_of(
    prompts: Iterable[Prompt], request: GenerationRequest, tokenizer: Any, config: T5Config
) -> Iterator[Iterator[Row]]:
    """Yields for each prompt its rows: one for each sample, or for each piece of a document.

    The first document that may begin with an unknown prefix is noted on standard error.

    Raises:
        UserError: documents cannot be cut, because the model has no tokenizer.
    """
    options, vocab_size, noted = request.document, config.vocab_size, False
    if options.split == "none":
        yield from (request.rows(prompt, tokenizer, vocab_size) for prompt in prompts)
        return
    if tokenizer is None:
        raise UserError("a split needs a tokenizer; add one to the model folder")
    of_pieces = replace(request, document=DocumentOptions(), stream=False)  # not cut again

    def piece_rows(whole: DocumentInFlight) -> Iterator[Row]:
        for piece in whole.prompts or [Prompt("")]:  # without a piece, one row that has failed
            for row in of_pieces.rows(piece, tokenizer, vocab_size):
                row.document = whole
                yield row

    for prompt in prompts:
        document = _document(prompt, options, tokenizer, config)
        if not isinstance(document, Exception) and document.doubtful and not noted:
            log(DOUBTFUL.format(brief(document.doubtful)))
            noted = True
        yield piece_rows(DocumentInFlight(document, prompt))


def _document(
    prompt: Prompt, options: DocumentOptions, tokenizer: Any, config: T5Config
) -> Document | Exception:
    """Returns a document whose pieces fit the model, or an error if the text is unusable."""
    source: Any = prompt.source
    try:
        if isinstance(source, Exception):
            raise UserError(str(source))
        if prompt.prediction is not None:  # of the whole text, so that is not cut
            if not options.target_language:
                raise UserError("prediction cannot be combined with split")
            options = replace(options, split="none")
        if prompt.attention_mask is not None:
            raise UserError("attention_mask cannot be combined with split")
        limits = config.n_positions, config.task_prefixes
        return fitted_document(source, options, tokenizer, *limits)
    except UserError as error:
        return error


def with_token_texts(chunk: Chunk, tokenizer: Any) -> Chunk:
    """Sets a chunk's `segments` to the texts of its tokens, if these make up the chunk's text."""
    detokenizer = StreamingDetokenizer(tokenizer)
    segments = [*map(detokenizer.add, chunk.tokens)]
    before = chunk.text.find("".join(segments))  # -1 if, say, the text was broken into lines
    if segments and before >= 0:
        chunk.segments = [chunk.text[:before] + segments[0], *segments[1:]]
    return chunk


def fitted_document(
    text: str, options: DocumentOptions, tokenizer: Any, limit: int | None, prefixes: Sequence[str]
) -> Document:
    """Returns a document whose prompts have at most `limit` tokens."""
    from mlx_t5.text.documents import Document  # slow to import, and few texts are documents

    def tokens(prompt: str) -> int:
        try:
            return len(encode(tokenizer, prompt))
        except UserError:  # decoding the piece will report it
            return 0

    return Document(text, options, tokens, limit, prefixes)
