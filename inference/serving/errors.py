"""Errors as the server's clients get them: OpenAI's form, with its `param` and `code`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import fields
from starlette.responses import JSONResponse

from ...heads.files import JsonObject

LONGEST_MESSAGE = 500  # characters: a message may name what a client sent
LONGEST_NAME = 64
"""Characters of a name for which a similar one is looked for, which takes quadratic time."""


class RequestError(Exception):
    """Request that is refused or fails: message, field that is meant, code, HTTP status, headers.

    The errors of the server itself have a status of 500 or more.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str | None = "invalid_value",
        status: int = 400,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.param, self.code, self.status, self.headers = param, code, status, headers

    def body(self) -> JsonObject:
        """Return the error as JSON."""
        text = str(self)
        if len(text) > LONGEST_MESSAGE:
            text = text[: LONGEST_MESSAGE - 1] + "…"
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": text, "type": kind, "param": self.param, "code": self.code}}

    def answer(self) -> JSONResponse:
        """Return the error as an answer."""
        return JSONResponse(self.body(), self.status, self.headers)


def refused_by_type(error: Exception, kind: type[Struct]) -> RequestError:
    """Return the refusal of a request whose body is not of the type `kind`, in clients' words."""
    message = str(error).replace("Object contains unknown field", "there is no field")
    message = message.replace("Object missing required field", "there has to be a field")
    message = message.replace(" | null`", "`")
    named = re.search(r"field `([^`]*)`", message)
    placed = re.search(r"at `\$\.(\w+)", message)
    param = placed[1] if placed else named[1] if named else None
    code = "invalid_type" if ", got `" in message else "invalid_value"
    if named is not None:
        unknown = "there is no field" in message
        code = "unknown_parameter" if unknown else "missing_required_parameter"
        close = similar(named[1], (field.name for field in fields(kind)))
        if unknown and not placed and close is not None:
            message += f"; did you mean `{close}`?"
    if param is not None and len(param) > LONGEST_NAME:
        param = None
    return RequestError(f"the request cannot be read: {message}", param, code)


def similar(name: str, known: Iterable[str]) -> str | None:
    """Return the name among `known` that was probably meant; None if none is similar."""
    if len(name) > LONGEST_NAME:
        return None
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)
