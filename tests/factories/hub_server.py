"""A fake Hugging Face hub: the part of its HTTP API that downloads use."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"

# Files by name, for every existing repository.
Repositories = dict[str, dict[str, bytes]]


@contextmanager
def hub_server(repositories: Repositories, gated: set[str]) -> Iterator[tuple[str, list[str]]]:
    """Serve `repositories`; yield the endpoint and the paths of downloaded files."""
    fetched: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

        def _answer(self) -> None:
            parts = self.path.partition("?")[0].strip("/").split("/")
            is_api = parts[:2] == ["api", "models"]
            name = "/".join(parts[2:4] if is_api else parts[:2])
            files = repositories.get(name)
            if files is None:
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            elif is_api and parts[4] == "revision":
                self._send(200, json.dumps({"id": name, "sha": COMMIT}).encode())
            elif is_api:
                tree = [
                    {"type": "file", "path": path, "size": len(data), "oid": _digest(data)}
                    for path, data in files.items()
                ]
                self._send(200, json.dumps(tree).encode())
            elif name in gated:
                self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
            else:
                self._send_file("/".join(parts[4:]), files)

        def _send_file(self, path: str, files: dict[str, bytes]) -> None:
            if self.command == "GET":
                fetched.append(path)
            headers = {"ETag": f'"{_digest(files[path])}"', "X-Repo-Commit": COMMIT}
            self._send(200, files[path], headers)

        def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for key, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", fetched
        finally:
            server.shutdown()
            thread.join()


def _digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
