"""Errors in the shape of OpenAI's API: {"error": {"message", "type", "param", "code"}}.

A message never quotes the text of a client's prompt, so no prompt gets into a log through an error.
A message may name an unknown field or task, shortened.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import BaseModel

from mlx_t5.errors import is_out_of_memory, shown

log = logging.getLogger(__name__)

MAX_NAME = 64  # characters shown of a field's name
RETRY_SECONDS = 5  # default of Retry-After
STOPPING_MESSAGE = "the server is shutting down"

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
COMPLAINTS = {
    "extra_forbidden": "there is no such field, or it is not supported; remove it",
    "none_required": "this is not supported; leave it out",
    "missing": "this field is needed",
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
        later = {"Retry-After": str(RETRY_SECONDS)} if status == 503 else {}
        self.status, self.headers = status, {**later, **(headers or {})}
        kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.body = ErrorBody(error=ErrorDetail(message=message, type=kind, param=param, code=code))

    @property
    def response(self) -> JSONResponse:
        """The error as an HTTP response; within a stream, an event with `body` is sent instead."""
        return JSONResponse(self.body.model_dump(), self.status, self.headers)


def internal_error() -> ApiError:
    """The error for an unexpected failure; the details are only in the log."""
    return ApiError(500, "internal error; the server's log says where")


def error_of_status(status: int, detail: str, headers: Mapping[str, str] | None = None) -> ApiError:
    """The error for an HTTP status that the framework raised, such as 404."""
    message = {
        404: "there is nothing at this address; see /docs",
        405: "this address does not take this method; see /docs",
    }.get(status, detail or HTTPStatus(status).phrase)
    return ApiError(status, message, headers=headers)


def error_of_validation(errors: Sequence[dict[str, Any]]) -> ApiError:
    """The error for the first invalid field of a body, from pydantic's list of errors.

    If a field may have several types, pydantic lists an error for each type. The message joins all
    errors of the field.
    """
    if errors[0]["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {errors[0]['ctx']['error']}")
    fields = [_field(error) for error in errors]
    param = shown(fields[0], MAX_NAME) if fields[0] is not None else None
    same = (e for e, field in zip(errors, fields, strict=True) if field == fields[0])
    message = ", or: ".join(dict.fromkeys(map(_complaint, same)))
    return ApiError(400, f"{param}: {message}" if param else message, param)


def _field(error: dict[str, Any]) -> str | None:
    """The name of the invalid field; None if the whole body is invalid."""
    return next((str(part) for part in error["loc"] if part != "body"), None)


def _complaint(error: dict[str, Any]) -> str:
    message = error["msg"].removeprefix("Value error, ")
    return COMPLAINTS.get(error["type"]) or message[:1].lower() + message[1:]


def raised_at(error: BaseException) -> str:
    """An exception's type and where it was raised, for the log.

    The exception's message and source lines are left out, because they may show a client's text.
    """
    trace, where = error.__traceback__, "?"
    while trace:
        where = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
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
