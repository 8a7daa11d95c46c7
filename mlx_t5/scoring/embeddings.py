"""Vectors of texts: the encoder's states, pooled as pooling.py says.

Symbols: B rows, S source positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mlx_t5.errors import UserError
from mlx_t5.network import memory
from mlx_t5.network.cache import source_width
from mlx_t5.network.ranks import ranks_of
from mlx_t5.pooling import normalized
from mlx_t5.ranges import FLAG, checked
from mlx_t5.scoring.passes import (
    DEFAULT_BATCH_SIZE,
    NotFinite,
    Part,
    attempt,
    by_length,
    each_read,
    in_order,
)
from mlx_t5.text.prompts import checked_prompts, padded, split, token_ids

if TYPE_CHECKING:
    from mlx_t5.text.codec import Codec

NOT_FINITE = "the model's states are NaN or infinite for this prompt; compute in another --dtype"


def embedding_ids(prompt: str | Sequence[int], tokenizer: Any, model: Any) -> list[int]:
    """The tokens of a prompt to embed; texts are prepared and cut as the model's folder says.

    Raises:
        UserError: see `prompts.token_ids`.
    """
    if not isinstance(prompt, str):
        return token_ids(prompt, tokenizer, model.config.vocab_size)
    text = model.pooling.read(prompt) if prompt.strip() else prompt
    return model.pooling.cut(token_ids(text, tokenizer, model.config.vocab_size))


def embeddings(
    model: Any,
    sources: Sequence[Sequence[int]],
    batch_size: int,
    normalize: bool,
    most_tokens: float = math.inf,
) -> Iterator[Part]:
    """Embeds prompts, batch by batch.

    Args:
        model: see `network.interface.Seq2Seq`; with `pooling`.
        sources: token ids.
        batch_size: prompts of a pass at most.
        normalize: whether vectors are to have length 1.
        most_tokens: of a pass, see `passes.by_length`.

    Yields:
        After each pass, places of prompts with their vectors (width,), float32, or their errors.
    """

    def work(batch: Sequence[Sequence[int]]) -> list[np.ndarray | UserError]:
        ranks, longest = ranks_of(model), max(map(len, batch))
        memory.require(model.encoder_memory(len(batch), source_width(longest)), ranks)
        with ranks.in_step():
            ids, mask = padded(batch, model.config.pad_token_id)
            vectors = model.pooling(model.encode(ids, mask), mask)
            rows = np.array(normalized(vectors) if normalize else vectors)
        return [row if np.isfinite(row).all() else NotFinite(NOT_FINITE) for row in rows]

    for places in by_length([len(source) for source in sources], batch_size, most_tokens):
        tokens = len(sources[places[0]])
        values = attempt(work, [sources[i] for i in places], f"a prompt of {tokens} tokens")
        yield list(zip(places, values, strict=True))


class Embedding:
    """Methods of `decoder.SpeculativeDecoder`. Neither draft nor decoder takes part."""

    model: Any
    codec: Codec

    def embed(
        self, prompts: Any, normalize: bool = False, batch_size: int = DEFAULT_BATCH_SIZE
    ) -> np.ndarray:
        """A vector of each prompt: the mean of the encoder's states, or what the folder says.

        Args:
            prompts: a text, a list of texts, token ids, or a list of those.
            normalize: whether vectors are to have length 1.
            batch_size: prompts of a pass at most; it bounds memory.

        Returns:
            float32 (n, width), a row a prompt; width is d_model, if the folder says no other.

        Raises:
            UserError: a prompt cannot be embedded.
        """
        prompts, _ = split(prompts)
        if not prompts:
            width = self.model.pooling.width(self.model.config.d_model)
            return np.zeros((0, width), np.float32)
        rows = []
        for i, row in enumerate(self.embeddings(prompts, normalize, batch_size), 1):
            if isinstance(row, Exception):
                raise UserError(str(row) if len(prompts) == 1 else f"prompt {i}: {row}")
            rows.append(row)
        return np.stack(rows)

    def embeddings(
        self,
        prompts: Iterable[str | Sequence[int] | Exception],
        normalize: bool = False,
        batch_size: int = DEFAULT_BATCH_SIZE,
        ready: Callable[[], bool] = lambda: True,
    ) -> Iterator[np.ndarray | Exception]:
        """`embed` for any number of prompts, which are drawn as needed; an error in its place.

        Raises:
            UserError: `prompts` is no iterable of prompts, or another value of the wrong kind.
        """
        prompts, _ = checked_prompts(prompts)
        size, unit = checked("batch_size", batch_size), checked("normalize", normalize, FLAG)
        parts = partial(self.embedding_parts, batch_size=size, normalize=unit)
        ids = partial(embedding_ids, tokenizer=self.codec.tokenizer, model=self.model)
        return in_order(each_read(prompts, ids), size, parts, ready)

    def embedding_parts(
        self,
        ids: Sequence[Sequence[int]],
        batch_size: int,
        normalize: bool,
        most_tokens: float = math.inf,
    ) -> Iterator[Part]:
        """`embeddings` with this model, for who wants to do something else between two passes."""
        return embeddings(self.model, ids, batch_size, normalize, most_tokens)
