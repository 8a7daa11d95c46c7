"""Tokenizes the texts of requests in a separate thread.

So a long text delays neither the event loop nor decoding. If the length of a text shows that it has
too many tokens, the text is refused before it is tokenized.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from mlx_t5.checkpoints.pooling import Pooling
from mlx_t5.errors import UserError
from mlx_t5.serving.api_error import ApiError
from mlx_t5.text.prompts import token_ids

T = TypeVar("T")

NAMES = {
    "prompt": "prompt",
    "prediction": "prediction",
    "input": "text",
    "targets": "target",
    "query": "query",
}


@dataclass(frozen=True)
class RequestLimits:
    """The limits of a request.

    Attributes:
        prompt_tokens: maximum number of tokens in a prompt.
        max_tokens: maximum number of tokens in a generated text, or in a target to score.
        rows: maximum number of texts that a request may ask for.
    """

    prompt_tokens: int
    max_tokens: int
    rows: int


class TokenizerThread:
    """A copy of the tokenizer, with the thread that uses this copy."""

    def __init__(self, tokenizer: Any, vocab_size: int, limits: RequestLimits):
        """Copies a tokenizer.

        Args:
            tokenizer: the model's tokenizer.
            vocab_size: number of token ids that the model has.
            limits: the limits of requests.
        """
        self.vocab_size, self._limits = vocab_size, limits
        self.tokenizer = copy.deepcopy(tokenizer)
        self._longest = max(map(len, self.tokenizer.get_vocab()))  # characters of a token
        self._executor = ThreadPoolExecutor(1, "tokenizer")

    async def token_ids(
        self,
        texts: Iterable[str | Sequence[int]],
        param: str = "prompt",
        prefix: str = "",
        pooling: Pooling | None = None,
    ) -> list[list[int]]:
        """Returns the tokens of each text; if a text is clearly too long, no text is tokenized.

        Args:
            texts: texts or lists of token ids. The ids are only checked.
            param: the request's field, for errors. The limit is `max_tokens` for "targets", and
                `prompt_tokens` for all other fields.
            prefix: a task's prefix, put before every text.
            pooling: for embeddings, the model's `Pooling`. The pooling's prompt is put before each
                text, and tokens beyond the pooling's limit are cut off.

        Raises:
            ApiError: a text is empty, too long or not valid, or an id is not in the vocabulary.
        """
        prefixed: list[Any] = [prefix + text if isinstance(text, str) else text for text in texts]
        for text in prefixed:
            self.require_short(text, param)
        all_ids = []
        for text in prefixed:
            pooled = pooling if isinstance(text, str) and text.strip() else None
            pooled_text = pooled.prompt + text if pooled else text
            work = partial(token_ids, pooled_text, vocab_size=self.vocab_size, what=NAMES[param])
            ids = await self.run(work, param)
            all_ids.append(pooled.cut(ids) if pooled else ids)
            self._require_few(all_ids[-1], param)
        return all_ids

    def beginning(self, text: str) -> str:
        """Returns the beginning of a text: as many characters as the longest prompt may have."""
        return text[: self._limits.prompt_tokens * self._longest]

    async def run(self, work: Callable[[Any], T], param: str = "prompt") -> T:
        """Calls `work(tokenizer)` in the thread, and returns its result.

        Raises:
            ApiError: `work` raises `UserError`.
        """
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._executor, partial(work, self.tokenizer))
        except UserError as error:
            raise ApiError(400, str(error), param) from None

    def require_short(self, text: str | Sequence[int], param: str) -> None:
        """Raises `ApiError` if a text's length alone shows that it has too many tokens."""
        if not isinstance(text, str):
            self._require_few(text, param)  # checked before the ids
        elif len(text) > self._most(param) * self._longest:
            raise self._too_long("more", param)  # without tokenizing

    def _require_few(self, ids: Sequence[int], param: str) -> None:
        if len(ids) > self._most(param):
            raise self._too_long(f"{len(ids)}", param)

    def _most(self, param: str) -> int:
        return self._limits.max_tokens if param == "targets" else self._limits.prompt_tokens

    def _too_long(self, count: str, param: str) -> ApiError:
        option = "--max-tokens" if param == "targets" else "--max-prompt-tokens"
        message = (
            f"the {NAMES[param]} has {count} tokens; at most {self._most(param)} are taken here "
            f"(the server's {option}); shorten it"
        )
        return ApiError(400, message, param, "context_length_exceeded")
