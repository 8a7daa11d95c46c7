"""Embeds texts: turns the encoder's states into a vector, as checkpoints/pooling.py says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from mlx_t5.backend import mx
from mlx_t5.backend.device_memory import require
from mlx_t5.checkpoints.pooling import normalized
from mlx_t5.errors import UserError
from mlx_t5.model import T5
from mlx_t5.network.cache import source_width
from mlx_t5.network.encoding import by_length, in_halves, padded
from mlx_t5.scoring.windows import NotFinite, Part, in_order, no_memory
from mlx_t5.settings import DEFAULT_BATCH_SIZE, FLAG, checked
from mlx_t5.text.prompts import Prompt, checked_prompts, numbered, token_ids
from mlx_t5.text.tokenizer import encode

NOT_FINITE = "the model's states are NaN or infinite for this prompt; compute in another --dtype"


def embedding_ids(prompt: Prompt, tokenizer: Any, model: T5) -> list[int]:
    """A prompt's tokens; a text, even an empty one, gets the pooling's prefix and length."""
    if not isinstance(prompt.source, str) or prompt.attention_mask is not None:
        return token_ids(prompt, tokenizer, model.config.vocab_size)
    text = model.pooling.prompt + prompt.source
    ids = encode(tokenizer, text) if tokenizer and not text.strip() else text
    return model.pooling.cut(token_ids(ids, tokenizer, model.config.vocab_size))


class Embeddings:
    """Implements `SpeculativeDecoder.embed` for one model, with its encoder alone."""

    def __init__(self, model: T5, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer

    def embed(
        self,
        prompts: Any,
        normalize: bool = False,
        batch_size: int = DEFAULT_BATCH_SIZE,
        attention_mask: Any = None,
    ) -> np.ndarray:
        """Returns a vector for each prompt: the mean state, unless the folder names other pooling.

        Args:
            prompts: a text, a list of texts, a list of token ids, or a list of lists of token ids.
            normalize: whether to scale vectors to length 1.
            batch_size: maximum number of prompts in a pass; it bounds memory.
            attention_mask: as in `SpeculativeDecoder.generate`.

        Returns:
            float32 (prompts, width); width is d_model or the output size of a dense layer.

        Raises:
            UserError: a prompt cannot be embedded.
        """
        prompts, _ = checked_prompts(prompts, attention_mask=attention_mask)
        if not prompts:
            width = self.model.pooling.width(self.model.config.d_model)
            return np.zeros((0, width), np.float32)
        rows = []
        for i, vector in enumerate(self.vectors(prompts, normalize, batch_size), 1):
            if isinstance(vector, Exception):
                raise UserError(str(vector) if len(prompts) == 1 else f"prompt {i}: {vector}")
            rows.append(vector)
        return np.stack(rows)

    def vectors(
        self,
        prompts: Iterable[Prompt | str | Sequence[int] | Exception],
        normalize: bool = False,
        batch_size: int = DEFAULT_BATCH_SIZE,
        ready: Callable[[], bool] = lambda: True,
    ) -> Iterator[np.ndarray | Exception]:
        """Yields each prompt's vector or its error; reads prompts lazily, as `windows.in_order`."""
        size, unit = checked("batch_size", batch_size), checked("normalize", normalize, FLAG)
        parts = partial(self.parts, batch_size=size, normalize=unit)
        ids = partial(embedding_ids, tokenizer=self.tokenizer, model=self.model)
        return in_order(numbered(prompts), ids, size, parts, ready)

    def parts(
        self,
        sources: Sequence[Sequence[int]],
        batch_size: int,
        normalize: bool,
        most_tokens: float = math.inf,
    ) -> Iterator[Part]:
        """Yields after each batch pairs of a prompt's index, and its vector (width,) or error."""
        model = self.model

        def work(batch: Sequence[Sequence[int]]) -> list[np.ndarray | UserError]:
            require(model.encoder_memory(len(batch), source_width(max(map(len, batch)))))
            ids, mask = padded(batch, model.config.pad_token_id)
            pooled = model.pooling(model.encode(ids, mask), mask)
            vectors = np.array(normalized(pooled) if normalize else pooled)
            mx.synchronize()  # raises if a pass has failed; Metal may return zeros for it
            return [v if np.isfinite(v).all() else NotFinite(NOT_FINITE) for v in vectors]

        def refuse(source: Sequence[int], reason: str) -> UserError:
            return no_memory(f"a prompt of {len(source)} tokens", reason)

        for indices in by_length(list(map(len, sources)), batch_size, most_tokens):
            values = in_halves(work, [sources[i] for i in indices], refuse)
            yield list(zip(indices, values, strict=True))
