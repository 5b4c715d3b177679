"""OpenAI's `/completions` API over HTTP, streamed as server-sent events."""

from __future__ import annotations

import time
from typing import Any

import aiohttp
import msgspec

from client.bench.compare.answer import Answer
from client.bench.compare.server import Connection
from client.bench.compare.workload import greedy
from client.bench.errors import BenchError
from client.bench.workload import Prompt

_WORDS = 300  # characters shown of an error's body


class PromptForm(msgspec.Struct):
    """How a server accepts prompts: as token ids, which are exact, until it refuses them."""

    takes_ids: bool = True


class CompletionsConnection(Connection):
    """An HTTP connection to one server.

    Args:
        url: the API's base URL, which ends in `/v1`.
        model: the server's name of its model.
        form: shared by all connections to the server.
    """

    def __init__(
        self, session: aiohttp.ClientSession, url: str, model: str, form: PromptForm
    ) -> None:
        self._session = session
        self._url = f"{url}/completions"
        self._model = model
        self._form = form

    async def ask(self, prompt: Prompt, output_tokens: int) -> Answer:
        """As `Connection.ask`."""
        with_ids = self._form.takes_ids
        try:
            return await self._ask(prompt.token_ids if with_ids else prompt.text, output_tokens)
        except _RefusedError:
            if not with_ids:
                raise
            answer = await self._ask(prompt.text, output_tokens)
            self._form.takes_ids = False
            return answer

    async def _ask(self, prompt: str | list[int], output_tokens: int) -> Answer:
        body = {
            "model": self._model,
            "prompt": prompt,
            "stream": True,
            # The second is vLLM's: the number of tokens so far, in each chunk.
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **greedy(output_tokens),
        }
        answer = Answer(time.perf_counter())
        try:
            async with self._session.post(self._url, json=body) as response:
                if response.status != 200:
                    text = (await response.text())[:_WORDS]
                    kind = _RefusedError if response.status in (400, 422) else BenchError
                    raise kind(f"{self._url} answers {response.status}: {text}")
                async for line in response.content:
                    if line.startswith(b"data:"):
                        take(answer, line[5:].strip(), time.perf_counter())
        except aiohttp.ClientError as error:
            raise BenchError(f"{self._url}: {error}") from None
        return answer


def take(answer: Answer, data: bytes, now: float) -> None:
    """Add one event to an answer.

    A chunk's own count of tokens so far takes precedence; otherwise each chunk with text counts as
    one token, which the final usage may correct.

    Raises:
        BenchError: the event is an error, or not a chunk.
    """
    if data == b"[DONE]":
        return
    try:
        chunk = _DECODER.decode(data)
    except msgspec.DecodeError as error:
        raise BenchError(f"an event of the stream cannot be read: {error}") from None
    if chunk.error is not None:
        raise BenchError(f"the stream ends with an error: {str(chunk.error)[:_WORDS]}")
    before = answer.num_tokens
    if chunk.usage is not None:
        answer.num_tokens = chunk.usage.completion_tokens
        answer.num_prompt_tokens = chunk.usage.prompt_tokens
    elif any(choice.text for choice in chunk.choices):
        answer.num_tokens += 1
    if chunk.choices and answer.num_tokens > before:
        answer.arrivals.append(now)


class _RefusedError(BenchError):
    """The server rejects this form of the request."""


class _Choice(msgspec.Struct):
    text: str = ""


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Chunk)
