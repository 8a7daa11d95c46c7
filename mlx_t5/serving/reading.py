"""Texts of requests become tokens, in a thread of their own.

A long text must delay neither other clients nor the batch. What is too long is refused before it
is read, as far as that shows.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from mlx_t5.errors import UserError
from mlx_t5.pooling import Pooling
from mlx_t5.serving.errors import ApiError
from mlx_t5.text.prompts import token_ids

T = TypeVar("T")

NAMES = {
    "prompt": "prompt",
    "input": "text",
    "targets": "target",
    "query": "query",
}


@dataclass(frozen=True)
class RequestLimits:
    """What a request may ask for.

    Attributes:
        prompt_tokens: of one prompt.
        max_tokens: of one text.
        rows: texts of one request.
    """

    prompt_tokens: int
    max_tokens: int
    rows: int


class Reader:
    """A copy of the tokenizer, with the thread that works with it."""

    def __init__(self, tokenizer: Any, vocab_size: int, limits: RequestLimits):
        """Reads for a model with so many ids, within limits."""
        self.vocab_size, self._limits = vocab_size, limits
        self.tokenizer = copy.deepcopy(tokenizer)
        self._longest = max(map(len, self.tokenizer.get_vocab()))  # characters of a token
        self._executor = ThreadPoolExecutor(1, "tokenizer")

    async def token_ids(
        self,
        text: str | Sequence[int],
        param: str = "prompt",
        prefix: str = "",
        pooling: Pooling | None = None,
    ) -> list[int]:
        """The tokens of a text, made in a thread of their own.

        Args:
            text: or token ids, which are checked.
            param: the field that it came in: "targets" are texts the model would write.
            prefix: a task's; put before a text.
            pooling: prepares and cuts a text, if given.

        Raises:
            ApiError: it is empty, too long or no valid text, or an id is not in the vocabulary.
        """
        text = prefix + text if isinstance(text, str) else text
        self.require_short(text, param)
        what = NAMES[param]
        if isinstance(text, str) and pooling and text.strip():
            ids = await self.with_tokenizer(self._reading(pooling.read(text), what), param)
            ids = pooling.cut(ids)
        else:
            ids = await self.with_tokenizer(self._reading(text, what), param)
        self.require_few(ids, param)
        return ids

    async def all_token_ids(
        self,
        texts: Iterable[str | Sequence[int]],
        param: str = "prompt",
        prefix: str = "",
        pooling: Pooling | None = None,
    ) -> list[list[int]]:
        """`token_ids` of several, of which none is read if one is seen to be too long."""
        texts = list(texts)
        for text in texts:
            self.require_short(text, param)
        return [await self.token_ids(text, param, prefix, pooling) for text in texts]

    def beginning(self, text: str) -> str:
        """As much of a text as all the tokens of a prompt can hold."""
        return text[: self._limits.prompt_tokens * self._longest]

    def _reading(self, text: str | Sequence[int], what: str) -> Callable[[Any], list[int]]:
        return lambda tokenizer: token_ids(text, tokenizer, self.vocab_size, what)

    async def with_tokenizer(self, work: Callable[[Any], T], param: str = "prompt") -> T:
        """What a function makes with the tokenizer, in a thread of its own.

        Raises:
            ApiError: it raises `UserError`.
        """
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._executor, partial(work, self.tokenizer))
        except UserError as error:
            raise ApiError(400, str(error), param) from None

    def require_short(self, text: str | Sequence[int], param: str) -> None:
        """Raises `ApiError` if a text has too many tokens, as far as that shows at once."""
        most = self._most(param)
        if isinstance(text, str) and len(text) > most * self._longest:
            raise self._too_long("more", param)  # no need to count
        if not isinstance(text, str):
            self.require_few(text, param)  # before every id is looked at

    def require_few(self, ids: Sequence[int], param: str) -> None:
        """Raises `ApiError` if there are more tokens than this field may have."""
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
