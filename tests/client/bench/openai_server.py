"""A small server process with OpenAI's `/v1/completions`, streaming one token at a time.

It appends each request as a JSON line to the file given by --requests.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar


class Handler(BaseHTTPRequestHandler):
    """Responds as the command line specifies."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    arguments: ClassVar[argparse.Namespace]
    loaded: ClassVar[float]
    streams: ClassVar[int] = 0

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "a model"}]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if time.monotonic() < self.loaded:
            self._send(503, {"error": "loading"})
            return
        prompt = request["prompt"]
        with open(self.arguments.requests, "a") as file:
            file.write(json.dumps({**request, "port": self.client_address[1]}) + "\n")
        if self.arguments.refuse_ids and isinstance(prompt, list):
            self._send(400, {"error": {"message": "prompt must be a string"}})
            return
        if not request.get("stream"):
            self._send(200, {"choices": [{"text": "x"}]})
            return
        self._stream(prompt, self.arguments.tokens or request["max_tokens"])

    def _stream(self, prompt: Any, num_tokens: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        count = len(prompt) if isinstance(prompt, list) else 0
        Handler.streams += 1
        if Handler.streams == self.arguments.dies_after:
            print("no memory", file=sys.stderr, flush=True)
            os._exit(3)
        for number in range(1, num_tokens + 1):
            time.sleep(self.arguments.delay)
            usage = {"prompt_tokens": count, "completion_tokens": number}
            self._event({"choices": [{"text": " x"}], "usage": usage})
        self._event({"choices": [], "usage": usage})
        self._write(b"data: [DONE]\n\n")
        self._write(b"")

    def _event(self, fields: dict[str, Any]) -> None:
        self._write(b"data: " + json.dumps(fields).encode() + b"\n\n")

    def _write(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _send(self, status: int, fields: dict[str, Any]) -> None:
        content = json.dumps(fields).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *words: Any) -> None:
        """Log nothing."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--requests", default="/dev/null")
    parser.add_argument("--refuse-ids", action="store_true")
    parser.add_argument("--tokens", type=int, help="of each answer, whatever is asked")
    parser.add_argument("--delay", type=float, default=0.002)
    parser.add_argument("--loads", type=float, default=0.0, help="seconds of 503")
    parser.add_argument("--fails", action="store_true")
    parser.add_argument("--dies-after", type=int, default=0, help="streams, in the middle of one")
    Handler.arguments = parser.parse_args()
    if Handler.arguments.fails:
        sys.exit("no such model")
    Handler.loaded = time.monotonic() + Handler.arguments.loads
    ThreadingHTTPServer(("127.0.0.1", Handler.arguments.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
