"""A server of known delays and faults: OpenAI's `/v1/completions`, a token at a time.

It appends each request to the file of --log as a JSON line, with the client's port, when it `got`
it and when it `wrote` each token, by `time.monotonic`. Delays are drawn by the request's number.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

from aiohttp import web


class Application:
    """Responds as the command line specifies."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.loaded = time.monotonic() + given.loads
        self.numbers, self.streams = count(), 0
        self.places = asyncio.Semaphore(given.capacity)

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "a model"}]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        got, given = time.monotonic(), self.given
        asked = await request.json()
        if got < self.loaded:
            return web.json_response({"error": "loading"}, status=503)
        assert request.transport is not None
        wrote: list[float] = []
        fields = {"port": request.transport.get_extra_info("peername")[1], "got": got}
        try:
            if given.refuse_ids and isinstance(asked["prompt"], list):
                return web.json_response({"error": "prompt must be a string"}, status=400)
            if not asked.get("stream"):
                return web.json_response({"choices": [{"text": "x"}]})
            return await self.stream(request, asked, wrote)
        finally:
            with given.log.open("a") as log:
                log.write(json.dumps({**asked, **fields, "wrote": wrote}) + "\n")

    async def stream(
        self, request: web.Request, asked: dict[str, object], wrote: list[float]
    ) -> web.StreamResponse:
        given, drawn = self.given, random.Random(next(self.numbers))
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        self.streams += 1
        if self.streams == given.dies_after:
            print("no memory", file=sys.stderr, flush=True)
            os._exit(3)
        usage = {"prompt_tokens": len(asked["prompt"])}  # type: ignore[arg-type]
        async with self.places:
            for number in range(given.tokens or asked["max_tokens"]):
                delay = given.gap if number else given.first
                await asyncio.sleep(delay * drawn.uniform(1 - given.spread, 1 + given.spread))
                wrote.append(time.monotonic())
                usage["completion_tokens"] = number + 1
                event = json.dumps({"choices": [{"text": " x"}], "usage": usage})
                await answer.write(f"data: {event}\n\n".encode())
        await answer.write(b"data: [DONE]\n\n")
        return answer


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--log", type=Path, default=Path(os.devnull))
    parser.add_argument("--first", type=float, default=0.002, help="seconds to the first token")
    parser.add_argument("--gap", type=float, default=0.002, help="seconds to each other one")
    parser.add_argument("--spread", type=float, default=0.0, help="of these, as a share")
    parser.add_argument("--capacity", type=int, default=1000, help="answers at once")
    parser.add_argument("--refuse-ids", action="store_true")
    parser.add_argument("--tokens", type=int, help="of each answer, whatever is asked")
    parser.add_argument("--loads", type=float, default=0.0, help="seconds of 503")
    parser.add_argument("--fails", action="store_true")
    parser.add_argument("--child", action="store_true", help="start another process")
    parser.add_argument("--dies-after", type=int, default=0, help="streams, in the middle of one")
    given = parser.parse_args()
    if given.fails:
        sys.exit("no such model")
    if given.child:
        subprocess.Popen(["sleep", "60"])
    server, app = Application(given), web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/completions", server.completions)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", given.port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
