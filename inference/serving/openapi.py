"""Description of the server's API as OpenAPI 3.1, made from the types that read requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...heads.files import JsonObject
from .errors import ErrorAnswer

Handler = Callable[[Request], Awaitable[Response]]
REFERENCE = "#/components/schemas/{name}"
EVENTS = "text/event-stream"
ERRORS = {
    "400": "The request cannot be honoured; `param` names its field.",
    "401": "The API key is missing or wrong.",
    "404": "There is no such model.",
    "408": "The body was not sent in time.",
    "413": "The body is too large.",
    "415": "The body is not JSON by its Content-Type.",
    "503": "As many requests wait as can, or the server is stopping.",
}


@dataclass(frozen=True)
class Endpoint:
    """One path of the API; the routes and their description are made from it."""

    path: str
    """With parameters in the form of OpenAPI: /v1/models/{model}."""
    handler: Handler
    meaning: str
    body: type[Any] | None = None
    """Type of the request's body, which is sent by POST; None: there is none, and GET is used."""
    errors: tuple[str, ...] = ()
    """Statuses of answers with errors, besides 401."""
    keyed: bool = True
    """Whether the API key is asked for, where there is one."""
    media: str = "application/json"

    @property
    def method(self) -> str:
        return "GET" if self.body is None else "POST"


def description(endpoints: Sequence[Endpoint], version: str, with_key: bool) -> JsonObject:
    """Return the OpenAPI document of a server; `with_key`: it asks for an API key."""
    bodies = [endpoint.body for endpoint in endpoints if endpoint.body is not None]
    _, schemas = msgspec.json.schema_components([*bodies, ErrorAnswer], ref_template=REFERENCE)
    paths: JsonObject = {}
    for endpoint in endpoints:
        paths[endpoint.path] = {endpoint.method.lower(): operation(endpoint, with_key)}
    components: JsonObject = {"schemas": schemas}
    if with_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "draftsmith serve", "version": version},
        "paths": paths,
        "components": components,
    }


def operation(endpoint: Endpoint, with_key: bool) -> JsonObject:
    """Return the description of one path."""
    kind = "object" if endpoint.media == "application/json" else "string"
    media = {endpoint.media: {"schema": {"type": kind}}}
    if endpoint.body is not None:
        media[EVENTS] = {"schema": {"type": "string"}}
    found: JsonObject = {
        "summary": endpoint.meaning,
        "responses": {"200": {"description": "Success.", "content": media}},
    }
    keyed = endpoint.keyed and with_key
    for status in (*endpoint.errors, *(["401"] if keyed else [])):
        found["responses"][status] = {
            "description": ERRORS[status],
            "content": {"application/json": {"schema": reference(ErrorAnswer)}},
        }
    if keyed:
        found["security"] = [{"key": []}]
    if endpoint.body is not None:
        content = {"application/json": {"schema": reference(endpoint.body)}}
        found["requestBody"] = {"required": True, "content": content}
    if "{" in endpoint.path:
        name = endpoint.path.partition("{")[2].partition("}")[0]
        schema = {"type": "string", "minLength": 1}
        found["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schema}]
    return found


def reference(kind: type[Any]) -> JsonObject:
    """Return the reference to the schema of a type."""
    return {"$ref": REFERENCE.format(name=kind.__name__)}
