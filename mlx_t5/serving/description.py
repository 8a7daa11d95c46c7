"""The API's description for clients and for /docs, at /openapi.json."""

from __future__ import annotations

import copy
import functools
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.routing import Route

from mlx_t5.serving.guard import PUBLIC_PATHS, has_key

NAMING = [f"{each}Request" for each in ("Completion", "Chat", "Embedding", "Score", "Rerank")]
TURN = ("system", "user")  # what a chat may consist of, or the second alone


def add_description(app: FastAPI, with_key: bool) -> None:
    """Describes the addresses; the model's name is for those who may see it."""

    @functools.cache
    def description(named: bool) -> dict[str, Any]:
        schema = copy.deepcopy(app.openapi())
        return _described(schema, app.state.service.model if named else None, with_key)

    async def describe(request: Request) -> Response:
        return JSONResponse(description(named=has_key(request.scope)))

    path = str(app.openapi_url)
    (place,) = (i for i, each in enumerate(app.routes) if getattr(each, "path", None) == path)
    app.routes[place] = Route(path, describe)


def _described(schema: dict[str, Any], model: str | None, with_key: bool) -> dict[str, Any]:
    """An OpenAPI description as it is true here.

    FastAPI's own validation error is never sent, one model is served, and a key may be needed.
    """
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            if with_key and path not in PUBLIC_PATHS:
                operation["security"] = [{"key": []}]
    if with_key:
        schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    schemas = schema["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for name in NAMING if model else ():
        schemas[name]["properties"]["model"]["anyOf"] = [{"const": model}, {"type": "null"}]
    schemas["ChatRequest"]["properties"]["messages"] = {"oneOf": [_turn("user"), _turn(*TURN)]}
    return schema


def _turn(*roles: str) -> dict[str, Any]:
    """JSON schema of messages of exactly these roles."""

    def message(role: str) -> dict[str, Any]:
        fixed = {"properties": {"role": {"const": role}}}
        return {"allOf": [{"$ref": "#/components/schemas/Message"}, fixed]}

    items = list(map(message, roles))
    return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
