"""Stand-in for the hub: data sets, with their commits, over HTTP on this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

MISSING = {"revision": "RevisionNotFound", "repository": "RepoNotFound", "file": "EntryNotFound"}


class DataHub:
    """Serves `repositories`: by name, by revision, the bytes of every file by its path.

    `asked` collects the files whose contents were asked for.
    """

    def __init__(self, repositories: dict[str, dict[str, dict[str, bytes]]]) -> None:
        hub, self.repositories, self.asked = self, repositories, list[str]()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                hub.answer(self)

            def do_GET(self) -> None:
                hub.answer(self)

            def do_POST(self) -> None:
                hub.answer(self)

            def log_message(self, format: str, *args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer one request, as far as `datasets` and `huggingface_hub` need it."""
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        parts = [unquote(part) for part in urlsplit(request.path).path.strip("/").split("/")]
        api = parts[0] == "api"
        name = "/".join(parts[1 + api : 3 + api])
        rest = parts[
            3 + api :
        ]  # [], [revision, R], [tree, R, ...], [paths-info, R], [resolve, R, ...]
        if name not in self.repositories:
            return send(request, 404, b"", missing="repository")
        by_commit = {commit_of(name, one): one for one in self.repositories[name]}
        revision = rest[1] if len(rest) > 1 else "main"
        revision = by_commit.get(revision, revision)
        if revision not in self.repositories[name]:
            return send(request, 404, b"", missing="revision")
        commit, files = commit_of(name, revision), self.repositories[name][revision]
        if not rest or rest[0] == "revision":
            siblings = [{"rfilename": path} for path in files]
            facts = {"id": name, "sha": commit, "siblings": siblings, "private": False}
            return send(request, 200, facts | {"tags": [], "downloads": 0}, commit)
        path = "/".join(rest[2:])
        if rest[0] == "tree":
            return send(request, 200, [e for e in entries(files) if e["path"].startswith(path)])
        if rest[0] == "paths-info":
            wanted = json.loads(body)["paths"] if b"{" in body else []
            return send(request, 200, [e for e in entries(files) if e["path"] in wanted])
        if rest[0] == "resolve" and path in files:
            if request.command == "GET":
                self.asked.append(path)
            return send(request, 200, files[path], commit)
        return send(request, 404, b"", commit, "file")


def commit_of(name: str, revision: str) -> str:
    """Return the commit of a revision."""
    return hashlib.sha1(f"{name} {revision}".encode()).hexdigest()


def entries(files: dict[str, bytes]) -> list[dict[str, Any]]:
    """Return the folders and files of a repository, as a tree of the hub lists them."""
    folders = {path[:end] for path in files for end, c in enumerate(path) if c == "/"}
    found = [{"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in folders]
    for path, content in files.items():
        oid = hashlib.sha1(content).hexdigest()
        found.append({"type": "file", "path": path, "oid": oid, "size": len(content)})
    return found


def send(
    request: BaseHTTPRequestHandler,
    status: int,
    content: Any,
    commit: str = "",
    missing: str | None = None,
) -> None:
    """Send an answer; a range of the content if the request asks for one."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    wanted = request.headers.get("Range")
    whole = len(data)
    if wanted and status == 200:
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        data, status = data[int(first) : int(last or whole) + 1], 206
    request.send_response(status)
    if missing is not None:
        request.send_header("X-Error-Code", MISSING[missing])
    if status == 206:
        request.send_header("Content-Range", f"bytes {first}-{last or whole - 1}/{whole}")
    request.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
    request.send_header("X-Repo-Commit", commit)
    request.send_header("Content-Length", str(len(data)))
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(data)
