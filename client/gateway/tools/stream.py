"""AnswerStream: an answer with calls, piece by piece."""

from __future__ import annotations

from uuid import uuid4

import msgspec

from client.gateway.schemas.responses import Delta, Function, ToolCallDelta
from client.gateway.tools.answer import Answer, ToolFormat, read_answer
from client.protocol import Chunk, Section


class AnswerStream:
    """Follows one sequence whose answer may call tools."""

    def __init__(self, form: ToolFormat) -> None:
        """`form` says how calls are found."""
        self._form = form
        self._sections: list[Section] = []
        self._answer = Answer()

    def delta(self, chunk: Chunk) -> Delta:
        """Return what the next chunk adds."""
        for part in chunk.sections or ():
            if self._sections and self._sections[-1].index == part.index:
                text = self._sections[-1].text + part.text
                self._sections[-1] = msgspec.structs.replace(self._sections[-1], text=text)
            else:
                self._sections.append(part)
        before = self._answer
        is_over = chunk.finish_reason is not None
        self._answer = now = read_answer(self._sections, self._form, is_over=is_over)
        delta = Delta()
        if content := now.content[len(before.content) :]:
            delta.content = content
        if reasoning := now.reasoning[len(before.reasoning) :]:
            delta.reasoning_content = delta.reasoning = reasoning
        if calls := _new_calls(before, now):
            delta.tool_calls = calls
        return delta

    def finish_reason(self, chunk: Chunk) -> str | None:
        """Return why the sequence ended: for its calls only if they are whole."""
        calls = self._answer.calls
        called = bool(calls) and all(call.is_complete for call in calls)
        return "tool_calls" if called and chunk.finish_reason == "stop" else chunk.finish_reason


def _new_calls(before: Answer, now: Answer) -> list[ToolCallDelta]:
    """Return what has been added to the calls: of a new one its id and name too."""
    deltas = []
    for index, call in enumerate(now.calls):
        if index >= len(before.calls):
            function = Function(call.arguments, call.name)
            call_id = f"call_{uuid4().hex[:24]}"
            deltas.append(ToolCallDelta(index, function, call_id, "function"))
        elif added := call.arguments[len(before.calls[index].arguments) :]:
            deltas.append(ToolCallDelta(index, Function(added)))
    return deltas
