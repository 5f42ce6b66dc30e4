"""Errors as the server's clients get them: OpenAI's form, with its `param` and `code`."""

from __future__ import annotations

import difflib
import re
from typing import Any

import msgspec
from msgspec import Struct
from starlette.responses import JSONResponse

from ...heads.files import JsonObject

LONGEST_MESSAGE = 500  # characters: a message may name what a client sent
LONGEST_NAME = 64
"""Characters of a name for which a similar one is looked for, which takes quadratic time."""


class ErrorBody(Struct):
    """What is wrong with a request, or with the server."""

    message: str
    type: str
    """invalid_request_error, or server_error where the request itself is in order."""
    param: str | None = None
    """Field of the request that is meant."""
    code: str | None = None


class ErrorAnswer(Struct):
    """Every answer that is not a success."""

    error: ErrorBody


class RequestError(Exception):
    """Request that is refused or fails: message, field that is meant, code, and HTTP status."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str = "invalid_value",
        status: int = 400,
    ) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


def error_of(
    message: str | Exception, status: int, param: str | None = None, code: str | None = None
) -> JsonObject:
    """Return an `ErrorAnswer` as JSON."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    text = str(message)
    if len(text) > LONGEST_MESSAGE:
        text = text[: LONGEST_MESSAGE - 1] + "…"
    return msgspec.to_builtins(ErrorAnswer(ErrorBody(text, kind, param, code)))


def failure(
    message: str | Exception,
    status: int,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    """Return the answer with an error."""
    return JSONResponse(error_of(message, status, param, code), status, headers)


def refused_by_type(error: Exception, kind: type[Any]) -> RequestError:
    """Return the refusal of a request whose body is not of the type `kind`, in clients' words."""
    message = str(error).replace("Object contains unknown field", "there is no field")
    message = message.replace("Object missing required field", "there has to be a field")
    message = message.replace(" | null`", "`")
    named = re.search(r"field `([^`]*)`", message)
    placed = re.search(r"at `\$\.(\w+)", message)
    param = placed[1] if placed else named[1] if named else None
    code = "invalid_value"
    if named is not None:
        unknown = "there is no field" in message
        code = "unknown_parameter" if unknown else "missing_required_parameter"
        known = [field.name for field in msgspec.structs.fields(kind)]
        if unknown and not placed and (close := similar(named[1], known)):
            message += f"; did you mean `{close}`?"
    elif ", got `" in message:
        code = "invalid_type"
    if param is not None and len(param) > LONGEST_NAME:
        param = None
    return RequestError(f"the request cannot be read: {message}", param, code)


def similar(name: str, known: list[str]) -> str | None:
    """Return the name among `known` that was probably meant; None if none is similar."""
    if len(name) > LONGEST_NAME:
        return None
    close = difflib.get_close_matches(name, known, n=1)
    return close[0] if close else None
