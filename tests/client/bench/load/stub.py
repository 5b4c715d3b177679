"""A server of known delays: OpenAI's `/v1/completions` that answers at set times.

It writes to the file given when it got each request, and when it wrote each token, by
`time.monotonic`. The delays are drawn from a seed by the number of the request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from itertools import count
from pathlib import Path

from aiohttp import web


def application(file: Path, *, capacity: int, first: float, gap: float) -> web.Application:
    numbers = count()
    places = asyncio.Semaphore(capacity)

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "stub"}]})

    async def completions(request: web.Request) -> web.StreamResponse:
        got = time.monotonic()
        body = await request.json()
        generator = random.Random(next(numbers))
        answer = web.StreamResponse()
        await answer.prepare(request)
        wrote = []
        async with places:
            await asyncio.sleep(first * generator.uniform(0.5, 1.5))
            for number in range(body["max_tokens"]):
                if number:
                    await asyncio.sleep(gap * generator.uniform(0.5, 1.5))
                wrote.append(time.monotonic())
                usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": number + 1}
                event = json.dumps({"choices": [{"text": " x"}], "usage": usage})
                await answer.write(f"data: {event}\n\n".encode())
        await answer.write(b"data: [DONE]\n\n")
        with file.open("a") as log:
            log.write(json.dumps({"got": got, "wrote": wrote}) + "\n")
        return answer

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", completions)
    return app


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--capacity", type=int, default=1000)
    parser.add_argument("--first", type=float, default=0.4)
    parser.add_argument("--gap", type=float, default=0.1)
    given = parser.parse_args()

    async def serve() -> None:
        app = application(given.log, capacity=given.capacity, first=given.first, gap=given.gap)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", given.port).start()
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
