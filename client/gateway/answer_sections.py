"""What of a chat's answer is reasoning, and what the answer itself."""

from __future__ import annotations

from client.gateway.schemas.responses import Delta
from client.protocol import Chunk


class AnswerSections:
    """Follows one sequence.

    A call of a tool that nobody asked for is a part of the answer, with its tags.
    """

    def __init__(self) -> None:
        self._last = ""  # type of the section before

    def finish_reason(self, chunk: Chunk) -> str | None:
        """Return why the sequence ended."""
        return chunk.finish_reason

    def delta(self, chunk: Chunk) -> Delta:
        """Return what the next chunk adds."""
        reasoning, content = "", ""
        for section in chunk.sections or ():
            if section.type == "reasoning":
                reasoning += section.text
            else:
                if "tool_call" in (section.type, self._last):
                    content += section.tag
                content += section.text
            self._last = section.type
        delta = Delta()
        if content:
            delta.content = content
        if reasoning:
            delta.reasoning_content = delta.reasoning = reasoning
        return delta
