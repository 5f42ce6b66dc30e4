"""API keys: of draftsmith's own server, and for servers that it is a client of.

A key comes from a file or a variable of the environment, since every user of a machine can read the
arguments of a process. httpx, the client, reads certificates of an authority of one's own from
SSL_CERT_FILE or SSL_CERT_DIR.
"""

from __future__ import annotations

import os
from pathlib import Path

from ...heads.errors import UserError

OF_SERVER = "DRAFTSMITH_SERVER_KEY"
"""Variable with the key that servers are sent, where no file is named."""


def read_key(key: str | None, file: str | None, option: str) -> str | None:
    """Return the key in `file`, which the user named with `option`, or else `key`.

    Returns None where there is neither. Raises `UserError` for a file that cannot be read, and a
    key that cannot be sent.
    """
    source = "the API key"
    if file is not None:
        source = f"{option} {file}"
        try:
            key = Path(file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise UserError(f"cannot read {source}: {reason}; check the path") from error
        if not key:
            raise UserError(f"{source} is empty; write the key into it")
    # A header of HTTP can carry neither control characters nor spaces at its ends.
    if key and (key != key.strip() or not key.isprintable()):
        raise UserError(f"{source} has spaces around it or characters that cannot be sent")
    return key or None


def headers_with_key(file: str | None = None, option: str = "") -> dict[str, str]:
    """Return the header by which requests to a server carry its key; none without a key.

    The key is in `file`, which the user named with `option`, or in the variable `OF_SERVER`. Raises
    `UserError` as `read_key` does.
    """
    key = read_key(os.environ.get(OF_SERVER), file, option)
    if key is not None and not key.isascii():
        raise UserError("the API key has characters that cannot be sent")
    return {} if key is None else {"Authorization": f"Bearer {key}"}
