"""Errors in the shape of OpenAI's API: {"error": {"message", "type", "param", "code"}}.

A message never quotes the text of a client's prompt, so no prompt gets into a log through an error.
A message may name an unknown field or task, shortened.
"""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from mlx_t5.errors import UserError, brief, is_out_of_memory

if TYPE_CHECKING:
    from fastapi.responses import JSONResponse

log = logging.getLogger(__name__)

SIMPLE_PATHS = ("/translate", "/languages")  # LibreTranslate's, whose errors are a sentence
MAX_NAME = 64  # characters shown of a field's name
RETRY_SECONDS = 5  # Retry-After
STOPPING_MESSAGE = "the server is shutting down"

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
MESSAGES = {  # by pydantic's types of errors
    "extra_forbidden": "there is no such field, or it is not supported; remove it",
    "none_required": "this is not supported; leave it out",
    "missing": "this field is needed",
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "it must be an object"),
}


class ErrorDetail(BaseModel):
    """The description of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every response that is an error."""

    error: ErrorDetail


class ApiError(Exception):
    """The refusal or the failure of a request, which is reported to the client."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        if status in (429, 503):
            self.headers["Retry-After"] = str(RETRY_SECONDS)
        kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.body = ErrorBody(error=ErrorDetail(message=message, type=kind, param=param, code=code))

    def response_for(self, scope: Mapping[str, Any]) -> JSONResponse:
        """The error as an HTTP response; within a stream, an event with `body` is sent instead."""
        from fastapi.responses import JSONResponse  # slow to import, and the worker needs errors

        path = scope["path"].removeprefix(scope.get("root_path", ""))
        simple = {"error": self.body.error.message}
        body = simple if path in SIMPLE_PATHS else self.body.model_dump()
        return JSONResponse(body, self.status, self.headers)


@contextmanager
def refusing(param: str | None = None) -> Iterator[None]:
    """Turns a `UserError` into the error of a request's field."""
    try:
        yield
    except UserError as error:
        raise ApiError(400, str(error), param) from None


def internal_error() -> ApiError:
    """The error for an unexpected failure; the details are only in the log."""
    return ApiError(500, "internal error; the server's log says where")


def error_of_validation(errors: Sequence[dict[str, Any]], body: Any) -> ApiError:
    """The error for the first invalid field of a body, from pydantic's list of errors.

    If a field may have several types, pydantic lists an error for each type. A value that has one
    of the types, or comes close to it, says more than the types that it does not have.
    """
    if errors[0]["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {errors[0]['ctx']['error']}")
    if body is None:
        return ApiError(400, "the body is empty; a JSON object is needed")
    paths = [_path(error, body) for error in errors]
    found = [(p, e) for p, e in zip(paths, errors, strict=True) if p[:1] == paths[0][:1]]
    other_type = ("_type", "literal_error")
    found = [(p, e) for p, e in found if not e["type"].endswith(other_type)] or found
    # Of equally deep errors, the one that is farthest in its lists.
    deepest = max((p for p, _ in found), key=lambda p: (len(p), [n for n in p if type(n) is int]))
    message, *others = dict.fromkeys(_message(error) for path, error in found if path == deepest)
    message = " or ".join([message, *(other.removeprefix("it must be ") for other in others)])
    param = "".join(f"[{p}]" if isinstance(p, int) else f".{brief(p, MAX_NAME)}" for p in deepest)
    param = param.removeprefix(".")
    if param:
        return ApiError(400, f"{param}: {message}", param)
    field = message.split()[0].rstrip(":")  # a sentence about several fields begins with one
    return ApiError(400, message, field if isinstance(body, dict) and field in body else None)


def _path(error: dict[str, Any], body: Any) -> list[str | int]:
    """Where an error is in a body; pydantic's `loc` also has the names of types."""
    path, value = list[str | int](), body
    for part in error["loc"][1:]:
        index = isinstance(part, int) and isinstance(value, list)
        if index or (isinstance(value, dict) and part in value):
            path.append(part)
            value = value[part]
    return [*path, error["loc"][-1]] if error["type"] == "missing" else path


def _message(error: dict[str, Any]) -> str:
    message = error["msg"].removeprefix("Value error, ").replace(" after validation", "")
    return MESSAGES.get(error["type"]) or re.sub(r"^[A-Z]\w+ should ", "it must ", message)


def raised_at(error: BaseException) -> str:
    """An exception's type and where it was raised, for the log.

    The exception's message and source lines are left out, because they may show a client's text.
    """
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"
    return f"{type(error).__name__} at {where}"


def failure_of(error: Exception) -> ApiError:
    """The error that the client gets for an exception; unless it is an `ApiError`, it is logged."""
    if isinstance(error, ApiError):
        return error
    log.error("a request failed: %s", raised_at(error))
    if is_out_of_memory(error):
        message = "no memory left for this batch; try again later, or with a shorter prompt"
        return ApiError(503, message)
    return internal_error()
