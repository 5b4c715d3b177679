"""Server-sent events over HTTP: OpenAI's completions and chats, and Triton's `generate_stream`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import aiohttp

from client.bench.load.connector import Connector, Event, Piece, RequestFailedError
from client.bench.load.prompts import Turn
from client.bench.load.record import Target

_WORDS = 300  # characters shown of an error's body
_BUSY = (429, 503)
_OUTPUTS = ("return_num_input_tokens", "return_num_output_tokens", "return_num_cached_tokens")


class HttpConnector(Connector):
    """One connection per request: some servers close theirs after a stream."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._takes_ids = target.form == "completions" and target.takes_ids
        headers = {"authorization": f"Bearer {target.key}"} if target.key else {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
            headers=headers,
        )
        paths = {
            "completions": "/completions",
            "chat": "/chat/completions",
            "triton-http": f"/v2/models/{target.model}/generate_stream",
        }
        self._url = target.url + paths[target.form]

    async def ask(self, turn: Turn, parameters: dict[str, Any], pieces: list[Piece]) -> None:
        """As `Connector.ask`; a server that refuses token ids is asked with text from then on."""
        with_ids = self._takes_ids and bool(turn.token_ids)
        try:
            await self._ask(self._body(turn, parameters, with_ids=with_ids), pieces)
        except _InvalidError:
            if not with_ids:
                raise
            await self._ask(self._body(turn, parameters, with_ids=False), pieces)
            self._takes_ids = False

    def _body(self, turn: Turn, parameters: dict[str, Any], *, with_ids: bool) -> dict[str, Any]:
        if self._target.form == "triton-http":
            wanted = dict.fromkeys(_OUTPUTS, True)
            asked = {"text_input": turn.text, "stream": True, "exclude_input_in_output": True}
            return {**asked, **wanted, "sampling_parameters": json.dumps(parameters)}
        body = {
            "model": self._target.model,
            "stream": True,
            # The second is vLLM's: the number of tokens so far, in each chunk.
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **parameters,
        }
        if self._target.form == "chat":
            return {**body, "messages": [{"role": "user", "content": turn.text}]}
        return {**body, "prompt": turn.token_ids if with_ids else turn.text}

    async def _ask(self, body: dict[str, Any], pieces: list[Piece]) -> None:
        try:
            async with self._session.post(self._url, json=body) as response:
                if response.status != 200:
                    text = f"{self._url} answers {response.status}: "
                    text += (await response.text())[:_WORDS]
                    if response.status in (400, 422):
                        raise _InvalidError(text)
                    raise RequestFailedError(text, refused=response.status in _BUSY)
                async for data in response.content.iter_any():
                    now = time.monotonic()
                    pieces.append((now, data))  # one by one: the request may be cut
        except aiohttp.ClientError as error:
            raise RequestFailedError(f"{self._url}: {error}") from None

    def events(self, pieces: list[Piece]) -> Iterator[Event]:
        """As `Connector.events`.

        A chunk's own count of tokens so far takes precedence; otherwise each chunk with text counts
        as one token, which the final usage may correct.
        """
        read = _triton_event if self._target.form == "triton-http" else _openai_event
        for at, data in events(pieces):
            try:
                event = read(at, json.loads(data))
            except (ValueError, AttributeError, TypeError, RecursionError) as error:
                raise RequestFailedError(f"an event cannot be read: {error}") from None
            if event.error:
                error_text = f"the stream ends with an error: {event.error[:_WORDS]}"
                event = event._replace(error=error_text)
            yield event

    async def close(self) -> None:
        """As `Connector.close`."""
        await self._session.close()


class _InvalidError(RequestFailedError):
    """The server rejects this form of the request."""


def events(pieces: list[Piece]) -> Iterator[Piece]:
    """Yield the data of each event, when its last byte arrived, without OpenAI's `[DONE]`."""
    rest = b""
    for at, data in pieces:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            content = line[5:].strip() if line.startswith(b"data:") else b""
            if content and content != b"[DONE]":
                yield at, content


def _openai_event(at: float, said: dict[str, Any]) -> Event:
    choices, usage = said.get("choices") or [], said.get("usage") or {}
    deltas = [choice.get("delta") or {"content": choice.get("text")} for choice in choices]
    text = "".join(each.get("content") or each.get("reasoning_content") or "" for each in deltas)
    return Event(
        *(at, text, int(bool(text)), usage.get("completion_tokens")),
        prompt_tokens=usage.get("prompt_tokens") or 0,
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        error=str(said.get("error") or ""),
        is_response=bool(choices),
    )


def _triton_event(at: float, said: dict[str, Any]) -> Event:
    return Event(
        *(at, said.get("text_output", ""), said.get("num_output_tokens", 0)),
        prompt_tokens=said.get("num_input_tokens", 0),
        cached_tokens=said.get("num_cached_tokens", 0),
        error=said.get("error", ""),
    )
