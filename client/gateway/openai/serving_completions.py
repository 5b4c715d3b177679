"""Serves `/v1/completions`: requests for the server, and the answer."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import chain
from typing import Any
from uuid import uuid4

from msgspec import UNSET, Raw

from client.errors import InvalidRequestError
from client.gateway.errors import ApiError, from_client, unsupported
from client.gateway.gateway import Gateway
from client.gateway.generation import AT_ONCE, Generation, UsageCount, encoded, merged
from client.gateway.openai.logprobs import (
    CompletionLogprobsBuilder,
    LogprobCount,
    first_token,
    prompt_logprobs,
)
from client.gateway.openai.protocol import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    names_of,
)
from client.gateway.schemas.limits import MAX_LOGPROBS_AT_ONCE
from client.protocol import Chunk, TokenLogprobs

MAX_PROMPTS = 256


class CompletionCall:
    """One request for completions."""

    def __init__(self, gateway: Gateway, body: CompletionRequest) -> None:
        """Check `body`, as far as that is not for the engine.

        Raises:
            ApiError: a field is wrong or not supported.
        """
        _check(body)
        self._gateway = gateway
        self._body = body
        self._model = gateway.model_named(body.model)
        self._id = f"cmpl-{uuid4().hex}"
        self._created = int(time.time())
        self._n = body.n or 1
        self._prompts = body.prompts()
        self._usage = UsageCount()
        self._logprobs = defaultdict[int, CompletionLogprobsBuilder](
            lambda: CompletionLogprobsBuilder(as_ids=bool(body.return_tokens_as_token_ids))
        )
        self._begun = set[int]()
        self._of_prompts = dict[int, Sequence[TokenLogprobs]]()  # of those that are echoed
        self._told_of_prompts = dict[int, Raw]()  # as JSON
        self._num_logprobs = LogprobCount()

    async def answer(self) -> Completion:
        """Return the whole.

        Raises:
            ApiError: the server refuses it, or fails.
        """
        found = defaultdict[int, list[CompletionChoice]](list)
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                found[piece.index].append(piece)
        ordered = [_joined(found[index]) for index in sorted(found)]
        return self._completion(ordered, usage=self._usage.usage())

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer as events; errors as in `answer`."""
        encode, body = self._gateway.encode_event, self._body
        usage: Any = None if body.include_usage else UNSET
        continuous_usage = body.continuous_usage
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                if continuous_usage:
                    usage = self._usage.usage()
                yield encode(self._completion([piece], usage=usage))
        if body.include_usage:
            yield encode(self._completion([], usage=self._usage.usage()))

    def _completion(self, choices: list[CompletionChoice], *, usage: Any) -> Completion:
        return Completion(self._id, self._created, self._model, choices, usage=usage)

    async def _pieces(self) -> AsyncGenerator[CompletionChoice, None]:
        generations, at_once = self._generations(), self._at_once()
        chunks = merged(self._gateway.client, generations, self._count, at_once=at_once)
        async with aclosing(chunks) as pieces:
            async for number, chunk in pieces:
                self._usage.add(number, chunk)
                if chunk.prompt_logprobs is None:
                    yield self._choice(number, chunk)
                else:  # of a long prompt they are many, and the event loop has others to serve
                    yield await asyncio.to_thread(self._choice, number, chunk)

    def _generations(self) -> list[Generation]:
        body = self._body
        sampling = body.sampling()
        given = {"max_tokens": body.max_tokens, "logprobs": body.logprobs, "echo": body.echo}
        sampling.update({name: value for name, value in given.items() if value is not None})
        if body.echo and body.max_tokens == 0:
            sampling.setdefault("prompt_logprobs", body.logprobs or 0)
        try:
            shared = encoded(sampling)
        except InvalidRequestError as error:
            raise from_client(error) from None
        return [
            Generation(
                self._id if len(self._prompts) == 1 else f"{self._id}-{number}",
                shared,
                prompt=prompt,
                priority=body.priority or 0,
                names=names_of("prompt", body.prompt, number),
            )
            for number, prompt in enumerate(self._prompts)
        ]

    def _at_once(self) -> int:
        """Return how many prompts are under way.

        The log-probabilities of a prompt come in one piece: those of prompts that are under way
        may be there together. A prompt has at most as many tokens as characters.
        """
        body = self._body
        tops = [body.prompt_logprobs, body.logprobs if body.echo else None]
        if tops == [None, None]:
            return AT_ONCE
        count = max(1 + (top or 0) for top in tops) * max(map(len, self._prompts))
        return min(max(1, MAX_LOGPROBS_AT_ONCE // max(count, 1)), AT_ONCE)

    def _choice(self, number: int, chunk: Chunk) -> CompletionChoice:
        index = number * self._n + chunk.index
        first = index not in self._begun
        self._begun.add(index)
        if chunk.prompt_logprobs is not None:
            self._keep_of_prompt(number, chunk.prompt_logprobs)
        choice = CompletionChoice(
            chunk.text,
            index,
            self._logprobs_of(number, index, chunk, first=first),
            chunk.finish_reason,
        )
        if first and number in self._told_of_prompts:
            choice.prompt_logprobs = self._told_of_prompts[number]
        return choice

    def _logprobs_of(
        self, number: int, index: int, chunk: Chunk, *, first: bool
    ) -> CompletionLogprobs | None:
        if self._body.logprobs is None:
            return None
        own = chunk.logprobs or ()
        if not (first and self._body.echo):
            return self._logprobs[index].piece(own)
        prompt = self._of_prompts.get(number, ())
        whole = self._prompts[number]
        start = first_token(chunk.text, whole if isinstance(whole, str) else None, prompt, own)
        return self._logprobs[index].piece((*prompt, *own), first=start)

    def _keep_of_prompt(self, number: int, positions: Sequence[TokenLogprobs]) -> None:
        """Keep the log-probabilities of a prompt for its choices, in the forms that are needed."""
        if self._body.echo:
            self._of_prompts[number] = positions
        if self._body.prompt_logprobs is not None:
            self._told_of_prompts[number] = prompt_logprobs(positions)

    def _count(self, chunk: Chunk) -> None:
        """Count the log-probabilities of a piece; each choice has those of its prompt.

        Raises:
            ApiError: the answer has too many.
        """
        body = self._body
        if body.stream:
            return
        if body.logprobs is not None:
            self._num_logprobs.add("logprobs", chunk.logprobs or ())
            if body.echo:
                self._num_logprobs.add("logprobs", chunk.prompt_logprobs or (), self._n)
        if body.prompt_logprobs is not None:
            self._num_logprobs.add("prompt_logprobs", chunk.prompt_logprobs or (), self._n)


def _joined(pieces: Sequence[CompletionChoice]) -> CompletionChoice:
    """Return a choice of its pieces; the first one has what there is of the prompt."""
    first, last = pieces[0], pieces[-1]
    found = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    logprobs = None
    if found:
        names = CompletionLogprobs.__struct_fields__
        columns = (chain.from_iterable(getattr(each, name) for each in found) for name in names)
        logprobs = CompletionLogprobs(*map(list, columns))
    return CompletionChoice(
        "".join(piece.text for piece in pieces),
        first.index,
        logprobs,
        last.finish_reason,
        first.prompt_logprobs,
    )


def _check(body: CompletionRequest) -> None:
    if body.suffix:
        raise unsupported("suffix", "is not supported: the model cannot fill in the middle")
    if body.stream_options is not None and not body.stream:
        raise ApiError("is allowed only if stream is true", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", "is not supported if stream is true")
    if not body.prompt:
        raise ApiError("must not be empty", param="prompt")
    if len(body.prompts()) > MAX_PROMPTS:
        raise ApiError(f"must have at most {MAX_PROMPTS} prompts", param="prompt")
