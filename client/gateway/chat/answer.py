"""ChatAnswer: the answer to a chat, piece by piece, before any route gives it its form."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

from msgspec.structs import replace

from client.gateway.chat.effort import effort_variables
from client.gateway.chat.tools import with_calls
from client.gateway.gateway import Gateway
from client.gateway.generation import Generation, UsageCount
from client.gateway.tool_calls import AnswerDelta, AnswerStream, ToolChoice
from client.protocol import ChatParameters, Chunk


class ChatAnswer:
    """One request to the server, and what its pieces are: reasoning, content, calls of tools.

    Attributes:
        usage: tokens so far.
    """

    def __init__(self, gateway: Gateway, generation: Generation, tool_choice: ToolChoice) -> None:
        """Take a request with `messages` and the sampling parameter `return_sections`."""
        assert generation.sampling.get("return_sections"), "pieces are told by their sections"
        self.usage = UsageCount()
        self._gateway = gateway
        self._generation = generation
        self._tool_choice = tool_choice

    async def pieces(
        self, *, by_section: bool = False
    ) -> AsyncGenerator[tuple[Chunk, AnswerDelta], None]:
        """Yield the chunks and what each adds to the answer of its sequence, once.

        Closing or cancelling it ends the request.

        Args:
            by_section: give each section of a chunk as a chunk of its own.

        Raises:
            ApiError: a tool or an effort cannot be had, or the server refuses the request or fails.
        """
        generation, choice = await self._with_effort(), self._tool_choice
        answers = defaultdict[int, AnswerStream](AnswerStream)
        if choice.mode != "none":
            parser = await self._gateway.served_model.tool_parser()
            generation = with_calls(generation, choice, parser)
            answers = defaultdict(lambda: AnswerStream(parser, choice.functions))
        async with aclosing(generation.chunks(self._gateway.client)) as chunks:
            async for chunk in chunks:
                self.usage.add(0, chunk)
                answer = answers[chunk.index]
                for piece in _by_section(chunk) if by_section else (chunk,):
                    yield piece, answer.add(piece.sections or (), piece.finish_reason)

    async def _with_effort(self) -> Generation:
        generation = self._generation
        if generation.reasoning_effort is None:
            return generation
        model = await self._gateway.served_model.facts()
        made: ChatParameters = {**(generation.chat_parameters or {})}
        variables = effort_variables(generation.reasoning_effort, model)
        variables |= made.get("chat_template_kwargs", {})  # what is asked for by name goes before
        if variables:
            made["chat_template_kwargs"] = variables
        return dataclasses.replace(generation, chat_parameters=made)


def _by_section(chunk: Chunk) -> Iterator[Chunk]:
    """Yield the parts of `chunk`, with their own log-probabilities."""
    sections = chunk.sections or ()
    if len(sections) < 2:
        yield chunk
        return
    begin = 0
    for number, section in enumerate(sections, start=1):
        end = begin + section.num_tokens
        is_last = number == len(sections)
        yield replace(
            chunk,
            text=section.text,
            sections=(section,),
            logprobs=chunk.logprobs and chunk.logprobs[begin : None if is_last else end],
            finish_reason=chunk.finish_reason if is_last else None,
        )
        begin = end
