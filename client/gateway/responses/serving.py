"""Serves `/v1/responses`: the chat that the server is asked, and the answer as items."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from msgspec import UNSET, structs

from client.gateway.errors import ApiError, unsupported
from client.gateway.gateway import Gateway
from client.gateway.generation import UsageCount
from client.gateway.openai.logprobs import LogprobCount, chat_logprobs
from client.gateway.openai.protocol import ChatRequest, TokenLogprob, Usage
from client.gateway.openai.serving_chat import ChatAnswer, generation_of
from client.gateway.openai.tools import tool_choice_of
from client.gateway.responses.conversation import Conversation
from client.gateway.responses.history import History
from client.gateway.responses.items import items_of, new_id
from client.gateway.responses.names import CalledName
from client.gateway.responses.protocol import (
    LOGPROBS,
    AnyJson,
    AnyText,
    Item,
    JsonOfSchema,
    ResponseRequest,
    TextFormat,
)
from client.gateway.responses.resource import (
    ArgumentsDelta,
    ArgumentsDone,
    ErrorEvent,
    Event,
    FunctionCall,
    IncompleteDetails,
    InputTokensDetails,
    ItemEvent,
    Message,
    OutputItem,
    OutputText,
    OutputTokensDetails,
    PartEvent,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseError,
    ResponseEvent,
    ResponseUsage,
    Status,
    TextDelta,
    TextDone,
)
from client.gateway.responses.tools import OfferedTools
from client.gateway.schemas.sampling import Fields, SamplingFields
from client.gateway.tool_parsers import Part, ReasoningDelta, ToolCallDelta
from client.protocol import Chunk, Health

_SHARED = {*SamplingFields.model_fields, "priority", "return_tokens_as_token_ids"} - {
    "response_format"
}

# Fields of a chat, and what they are called here.
_NAMES = (
    (re.compile(r"\bmax_completion_tokens\b"), "max_output_tokens"),
    (re.compile(r"\bresponse_format(\.json_schema)?\b"), "text.format"),
    (re.compile(r"\b(chat_template_kwargs\.)?reasoning_effort\b"), "reasoning.effort"),
    (re.compile(r" without prompt_logprobs\b"), ""),  # which are no field here
    (re.compile(r"(^|\btokens of )messages\b(?!\[)"), r"\1input"),
)
_FILTERS = ("top_p", "top_k", "min_p", "typical_p", "top_n_sigma")


def chat_of(
    body: ResponseRequest, messages: list[dict[str, Any]], tools: OfferedTools
) -> ChatRequest:
    """Return the request to answer `messages`, with `tools`, in the way that `body` asks for.

    Raises:
        ApiError: fields of `body` do not go together.
    """
    if body.stream_options is not None and not body.stream:
        raise ApiError("is allowed only if stream is true", param="stream_options")
    if body.top_logprobs and not body.wants_logprobs:
        raise ApiError(f"needs {LOGPROBS} in include; add it there", param="top_logprobs")
    return ChatRequest.model_construct(
        **{name: getattr(body, name) for name in _SHARED},
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        logprobs=body.wants_logprobs,
        top_logprobs=body.top_logprobs if body.wants_logprobs else None,
        tools=tools.of_chat,
        tool_choice=_choice(body),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.effort,
        response_format=_response_format(body.text_format),
        chat_template_kwargs=body.chat_template_kwargs,
    )


def in_names_of_responses(error: ApiError, tools: OfferedTools) -> ApiError:
    """Return an error of a chat in the names that its fields have here."""
    message, *params = map(tools.placed, (error.message, *error.params))
    for pattern, name in _NAMES:
        message, *params = (pattern.sub(name, text) for text in (message, *params))
    return error.reworded(message, params)


def sampling_told(body: ResponseRequest, model: Health) -> dict[str, float]:
    """Return the `temperature` and `top_p` that `model` takes where `body` has none."""
    defaults = model.sampling_defaults
    # Who shapes the distribution means to draw from it.
    draws = model.do_sample or any(getattr(body, name) is not None for name in _FILTERS)
    used = {
        "temperature": defaults.get("temperature", 1.0) if draws else 0.0,
        "top_p": defaults.get("top_p", 1.0),
    }
    return {name: used[name] if (own := getattr(body, name)) is None else own for name in used}


def told_of(body: ResponseRequest, tools: OfferedTools) -> dict[str, Any]:
    """Return the fields of `body` that the response echoes, with defaults for those left out."""
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": body.effort,
            "summary": body.reasoning and body.reasoning.summary,
        },
        "safety_identifier": body.safety_identifier,
        "text": {"format": _told_format(body.text_format), "verbosity": "medium"},
        "tool_choice": _choice(body) or "auto",
        "tools": tools.told,
        "top_logprobs": body.top_logprobs or 0,
        "presence_penalty": body.presence_penalty or 0.0,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "user": body.user,
        "metadata": body.metadata or {},
    }


def _choice(body: ResponseRequest) -> Any:
    choice = body.tool_choice
    return choice.model_dump() if isinstance(choice, Fields) else choice


def _response_format(given: TextFormat) -> dict[str, Any] | None:
    if isinstance(given, AnyText):
        return None
    if isinstance(given, AnyJson):
        return given.model_dump()
    inner = given.model_dump(exclude={"type"}, exclude_none=True, by_alias=True)
    return {"type": "json_schema", "json_schema": inner}


def _told_format(given: TextFormat) -> dict[str, Any]:
    if not isinstance(given, JsonOfSchema):
        return given.model_dump()
    return {**given.model_dump(by_alias=True), "strict": given.strict is not False}


_ADDED, _DONE = "response.output_item.added", "response.output_item.done"
_PART_ADDED, _PART_DONE = "response.content_part.added", "response.content_part.done"
_CALL = "response.function_call_arguments"


class TextForm(NamedTuple):
    """The form of an item of text: begin of its id, its type, that of its part, their name."""

    prefix: str
    item: type[Message] | type[ReasoningItem]
    part: type[OutputText] | type[ReasoningText]
    event: str


MESSAGE = TextForm("msg", Message, OutputText, "response.output_text")
REASONING = TextForm("rs", ReasoningItem, ReasoningText, "response.reasoning_text")


class TextWriter:
    """Writes a message, or reasoning.

    Attributes:
        form: which of them.
        item: as it was at its begin; whole after `end`.
    """

    def __init__(self, index: int, form: TextForm) -> None:
        """Begin item number `index` of a response."""
        self.form = form
        self.item = form.item(id=new_id(form.prefix), status="in_progress")
        self._index = index
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def begin(self) -> list[Event]:
        """Return the events of its begin."""
        return [
            ItemEvent(type=_ADDED, output_index=self._index, item=self.item),
            PartEvent(type=_PART_ADDED, part=self.form.part(), **self._ids),
        ]

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> list[Event]:
        """Write more of it, and return the event of that; only messages have `logprobs`."""
        self._texts.append(text)
        self._logprobs += logprobs
        own = self._with_logprobs(list(logprobs))
        return [TextDelta(type=f"{self.form.event}.delta", delta=text, **self._ids, **own)]

    def end(self, status: Status) -> list[Event]:
        """Write no more; return the events of that."""
        text, own = "".join(self._texts), self._with_logprobs(self._logprobs)
        content: Any = [self.form.part(text=text, **own)]
        self.item = self.form.item(id=self.item.id, status=status, content=content)
        return [
            TextDone(type=f"{self.form.event}.done", text=text, **self._ids, **own),
            PartEvent(type=_PART_DONE, part=content[0], **self._ids),
            ItemEvent(type=_DONE, output_index=self._index, item=self.item),
        ]

    @property
    def _ids(self) -> dict[str, Any]:
        return {"item_id": self.item.id, "output_index": self._index}

    def _with_logprobs(self, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        return {"logprobs": logprobs} if self.form is MESSAGE else {}


class CallWriter:
    """Writes a call of a function.

    Attributes:
        item: as in `TextWriter`.
    """

    def __init__(self, index: int, call_id: str, called: CalledName) -> None:
        """Begin item number `index` of a response."""
        self.item = FunctionCall(
            id=new_id("fc"),
            status="in_progress",
            call_id=call_id,
            name=called.name,
            namespace=called.namespace or UNSET,
        )
        self._index = index
        self._arguments: list[str] = []

    def begin(self) -> list[Event]:
        """Return the event of its begin."""
        return [ItemEvent(type=_ADDED, output_index=self._index, item=self.item)]

    def add(self, arguments: str) -> list[Event]:
        """Write more of its arguments, and return the event of that."""
        self._arguments.append(arguments)
        return [ArgumentsDelta(type=f"{_CALL}.delta", delta=arguments, **self._ids)]

    def end(self, status: Status) -> list[Event]:
        """Write no more; return the events of that."""
        arguments, item = "".join(self._arguments), self.item
        self.item = structs.replace(item, status=status, arguments=arguments)
        return [
            ArgumentsDone(type=f"{_CALL}.done", name=item.name, arguments=arguments, **self._ids),
            ItemEvent(type=_DONE, output_index=self._index, item=self.item),
        ]

    @property
    def _ids(self) -> dict[str, Any]:
        return {"item_id": self.item.id, "output_index": self._index}


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
            raise unsupported("store", "is not supported: this gateway stores no responses")
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
