"""Stand-in for the hub that takes uploads."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as an upload of small files needs."""

    files: dict[str, bytes] = {}  # noqa: RUF012
    created: list[Any] = []  # noqa: RUF012

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.path == "/api/repos/create":
            self.created.append(json.loads(body))
            self.answer({"url": f"http://{self.headers['Host']}/me/medusa"})
        elif "/preupload/" in self.path:
            self.answer(
                {
                    "files": [
                        {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                        for f in json.loads(body)["files"]
                    ]
                }
            )
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            host = self.headers["Host"]
            self.answer(
                {
                    "commitUrl": f"http://{host}/me/medusa/commit/0",
                    "commitOid": "0" * 40,
                    "success": True,
                }
            )
        else:
            self.answer({})

    def do_GET(self) -> None:
        self.answer({"sha": "0" * 40, "siblings": [], "id": "me/medusa", "private": True})

    def answer(self, value: Any) -> None:
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
