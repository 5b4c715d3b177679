"""ResponseCall: a request of `/v1/responses` to one of the server, and the answer back."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing

from msgspec import structs

from client.gateway.chat.answer import ChatAnswer
from client.gateway.chat.request import generation_of
from client.gateway.chat.tools import tool_choice_of
from client.gateway.errors import ApiError, unsupported
from client.gateway.gateway import Gateway
from client.gateway.generation import UsageCount
from client.gateway.logprobs import LogprobCount, chat_logprobs
from client.gateway.responses.conversation import Conversation
from client.gateway.responses.history import History
from client.gateway.responses.item_writers import (
    MESSAGE,
    REASONING,
    CallWriter,
    TextForm,
    TextWriter,
    new_id,
)
from client.gateway.responses.items import items_of
from client.gateway.responses.names import CalledName
from client.gateway.responses.request import chat_of, in_names_of_responses, sampling_told, told_of
from client.gateway.responses.tools import OfferedTools
from client.gateway.schemas.answers import TokenLogprob, Usage
from client.gateway.schemas.response_items import Item
from client.gateway.schemas.response_request import ResponseRequest
from client.gateway.schemas.response_resource import (
    ErrorEvent,
    Event,
    IncompleteDetails,
    InputTokensDetails,
    OutputItem,
    OutputTokensDetails,
    ReasoningItem,
    Response,
    ResponseError,
    ResponseEvent,
    ResponseUsage,
    Status,
)
from client.gateway.tool_calls import Part, ReasoningDelta, ToolCallDelta
from client.protocol import Chunk, Health


class OutputWriter:
    """Puts items together, one after the other, as the model writes them.

    The items do not depend on how the answer was cut into pieces.

    Attributes:
        items: that have ended.
    """

    def __init__(self, names: Mapping[str, CalledName] | None = None) -> None:
        """`names` are those of functions that the model calls otherwise, by what it calls them."""
        self._names = names or {}
        self.items: list[OutputItem] = []
        self._open: TextWriter | CallWriter | None = None
        self._logprobs: list[TokenLogprob] = []  # of tags and blanks: with the text that follows

    def add(self, parts: Iterable[Part], logprobs: Sequence[TokenLogprob] = ()) -> Iterator[Event]:
        """Write `parts`, and yield the events of that.

        Args:
            logprobs: of the tokens that are not of reasoning and calls.
        """
        self._logprobs += logprobs
        for part in parts:
            if isinstance(part, ToolCallDelta):
                yield from self._add_call(part)
            elif part.text:
                is_reasoning = isinstance(part, ReasoningDelta)
                yield from self._add_text(part.text, REASONING if is_reasoning else MESSAGE)

    def finish(self, reason: str) -> Iterator[Event]:
        """End the last item, and yield the events of that. An answer of nothing is a message.

        Args:
            reason: why there is no more, in the words of `AnswerDelta`.
        """
        is_whole = reason in ("stop", "tool_calls")
        if is_whole and self._is_silent:
            yield from self._add_text("", MESSAGE)
        # A model may also stop in the midst of a call.
        is_whole &= reason == "tool_calls" or not isinstance(self._open, CallWriter)
        yield from self._end("completed" if is_whole else "incomplete")

    @property
    def _is_silent(self) -> bool:
        return all(isinstance(item, ReasoningItem) for item in self.items) and (
            self._open is None or self._is_open(REASONING)
        )

    def _add_text(self, text: str, form: TextForm) -> Iterator[Event]:
        if not self._is_open(form):
            yield from self._end("completed")
            self._open = TextWriter(len(self.items), form)
            yield from self._open.begin()
        assert isinstance(self._open, TextWriter)
        yield from self._open.add(text, self._take_logprobs() if form is MESSAGE else ())

    def _add_call(self, part: ToolCallDelta) -> Iterator[Event]:
        if part.id:
            yield from self._end("completed")
            called = self._names.get(part.name, CalledName(part.name))
            self._open = CallWriter(len(self.items), part.id, called)
            yield from self._open.begin()
        assert isinstance(self._open, CallWriter), "a call ends before what follows it"
        yield from self._open.add(part.arguments)

    def _end(self, status: Status) -> Iterator[Event]:
        if self._open is None:
            return
        if self._logprobs and self._is_open(MESSAGE):
            yield from self._add_text("", MESSAGE)
        yield from self._open.end(status)
        self.items.append(self._open.item)
        self._open = None

    def _is_open(self, form: TextForm) -> bool:
        return isinstance(self._open, TextWriter) and self._open.form is form

    def _take_logprobs(self) -> list[TokenLogprob]:
        taken, self._logprobs = self._logprobs, []
        return taken


class ResponseCall:
    """One request for a response."""

    def __init__(self, gateway: Gateway, body: ResponseRequest) -> None:
        """Check `body`, as far as it can be without what is stored and the engine.

        Raises:
            ApiError: a field is wrong or not supported.
        """
        if body.store and not gateway.responses.max_responses:
            raise unsupported("store", "this gateway keeps no responses")
        self._gateway = gateway
        self._body = body
        self._tools = OfferedTools(body)
        self._response = Response(
            id=new_id("resp"),
            created_at=int(time.time()),
            model=gateway.model_named(body.model),
            store=bool(body.store),
            **told_of(body, self._tools),
        )
        self._history = History(gateway.responses, gateway.owner)
        self._output = OutputWriter(self._tools.names)
        self._items: list[Item] = []
        self._usage = UsageCount()
        self._num_logprobs = LogprobCount()

    async def answer(self) -> Response:
        """Return the whole.

        Raises:
            ApiError: an earlier response is not there, or the server refuses the request, or fails.
        """
        async with aclosing(self._events()) as events:
            async for _ in events:
                pass
        return self._response

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the response as events; errors as in `answer`, until the first event is out."""
        number = 0
        async with aclosing(self._events_to_the_end()) as events:
            async for event in events:
                event.sequence_number = number
                number += 1
                yield self._gateway.encode_event.named(event.type, event)

    async def _events_to_the_end(self) -> AsyncGenerator[Event, None]:
        has_begun = False
        try:
            async with aclosing(self._events()) as events:
                async for event in events:
                    has_begun = True
                    yield event
        except ApiError as error:
            if not has_begun:
                raise
            for event in self._output.finish("error"):
                yield event
            yield ErrorEvent(code=error.code, message=str(error), param=error.param)
            yield await self._end("error", str(error))

    async def _events(self) -> AsyncGenerator[Event, None]:
        model = await self._gateway.served_model.facts()
        self._response = structs.replace(self._response, **sampling_told(self._body, model))
        conversation = await self._conversation(model)
        try:
            async with aclosing(self._pieces(conversation)) as pieces:
                async for event in pieces:
                    yield event
        except ApiError as error:
            raise in_names_of_responses(conversation.told(error), self._tools) from None

    async def _pieces(self, conversation: Conversation) -> AsyncGenerator[Event, None]:
        chat = chat_of(self._body, conversation.messages, self._tools)
        generation = generation_of(chat, self._response.id)
        tool_choice = tool_choice_of(chat.tools, chat.tool_choice, chat.parallel_tool_calls)
        answer = ChatAnswer(self._gateway, generation, tool_choice)
        self._usage = answer.usage
        has_begun = False
        async with aclosing(answer.pieces(by_section=self._body.wants_logprobs)) as pieces:
            async for chunk, added in pieces:
                if not has_begun:
                    has_begun = True
                    yield self._event("created")
                    yield self._event("in_progress")
                for event in self._output.add(added.parts, self._logprobs(chunk)):
                    yield event
                if added.finish_reason is not None:
                    for event in self._output.finish(added.finish_reason):
                        yield event
                    yield await self._end(added.finish_reason)

    async def _conversation(self, model: Health) -> Conversation:
        """Return what is to be answered: what is stored of it, and what is new."""
        body, made = self._body, Conversation(takes_late_system=model.takes_late_system)
        if body.instructions:
            made.add_system(body.instructions, "instructions")
        if body.previous_response_id is not None:
            self._items = await self._history.before(body.previous_response_id)
            made.add(self._items, "previous_response_id")
        own = await self._history.resolved(items_of(body))
        made.add(own, "input" if isinstance(body.input, str) else "input[{}]")
        self._items = [*self._items, *own]
        return made

    async def _end(self, reason: str, message: str = "") -> Event:
        """End the response, keep it if that is wanted, and return the event of that."""
        response = self._response
        response.output = self._output.items
        response.usage = _usage(self._usage.usage())
        if reason in ("stop", "tool_calls"):
            response.status = "completed"
            response.completed_at = int(time.time())
        elif reason == "length":
            response.status = "incomplete"
            response.incomplete_details = IncompleteDetails("max_output_tokens")
        else:
            response.status = "failed"
            ended = message or "the request was ended from outside"
            response.error = ResponseError("server_error", ended)
        if response.store:
            response.store = await self._history.keep(response, self._items)
        return self._event(response.status)

    def _event(self, kind: str) -> ResponseEvent:
        return ResponseEvent(type=f"response.{kind}", response=self._response)

    def _logprobs(self, chunk: Chunk) -> list[TokenLogprob]:
        sections = chunk.sections or ()
        if chunk.logprobs is None or not all(part.type == "content" for part in sections):
            return []
        # A stream has them all in its last events.
        self._num_logprobs.add("top_logprobs", chunk.logprobs)
        found = chat_logprobs(
            chunk.logprobs,
            self._body.top_logprobs or 0,
            as_ids=bool(self._body.return_tokens_as_token_ids),
        )
        return [_with_bytes(each) for each in found.content]


def _usage(usage: Usage) -> ResponseUsage:
    details = usage.completion_tokens_details
    return ResponseUsage(
        usage.prompt_tokens,
        InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        usage.completion_tokens,
        OutputTokensDetails(details.reasoning_tokens if details else 0),
        usage.total_tokens,
    )


def _with_bytes(position: TokenLogprob) -> TokenLogprob:
    """Return `position` with no bytes where they are not known: null is not allowed here."""
    top = [structs.replace(each, bytes=each.bytes or []) for each in position.top_logprobs]
    return structs.replace(position, bytes=position.bytes or [], top_logprobs=top)
