"""Incremental parsing of one sequence's reasoning and tool calls in the engine, token by token."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from engine.text.detokenizer import Detokenizer
from engine.text.output_parsing.chunk_parser import read_events
from engine.text.output_parsing.parser import OutputParser, ParserState
from engine.text.output_parsing.parser_spec import ParserSpec


class OutputTracker:
    """Parses the output of one sequence; finds where chunks may end and how each one begins.

    Attributes:
        num_held_tokens: of the last tokens, how many must not be released yet, because a chunk that
            ended with them would end inside a tag, or in text that a stop string may still take.
        has_reasoning_ended: whether the text is, or has been, the answer itself: reasoning was
            closed, or other text than reasoning has come. At once, if no reasoning can come.
    """

    def __init__(
        self,
        parser_spec: ParserSpec,
        detokenizer: Detokenizer,
        window_ids: Sequence[int],
        parser_state: ParserState,
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        """Start after a prompt with the window `window_ids`, whose end has `parser_state`."""
        begin = ParserState(parser_state.state)
        self.num_held_tokens = 0
        self._detokenizer = detokenizer
        self._format = parser_spec
        self._window_ids = list(window_ids)
        self._skip = skip_special_tokens
        self._markers = parser_spec.markers(skip_special_tokens)
        self._parser = OutputParser(parser_spec, begin)
        self._num_tokens = 0
        self._begin = begin
        # Numbers of tokens after which a chunk may end, the first one as of now, and the states.
        self._borders = deque([(0, begin)])
        self.has_reasoning_ended = self._parser.state.is_answer and (
            parser_state.number > 0 or not parser_spec.has_reasoning
        )

    @property
    def is_reasoning(self) -> bool:
        """Whether the next text is reasoning, unless it ends that."""
        return self._parser.state.kind == "reasoning"

    @property
    def state(self) -> int:
        """The state of the `ParserSpec` that the next text is in."""
        return self._parser.parser_state.state

    @property
    def is_inside_character(self) -> bool:
        """Whether the tokens so far leave a character incomplete."""
        held = self._detokenizer.delta(
            self._window_ids, [], final=True, skip_special_tokens=self._skip
        )
        return held.endswith("\N{REPLACEMENT CHARACTER}")

    @property
    def begun_tag(self) -> str:
        """The end of the text, if it may become a tag; the beginning of that."""
        return self._parser.begun_tag

    def append(self, token_id: int, num_held_tokens: int = 0) -> None:
        """Add one output token.

        Args:
            num_held_tokens: of the last tokens, how many must be held for another reason.
        """
        events = read_events(
            self._detokenizer,
            self._markers,
            self._window_ids,
            [token_id],
            final=False,
            skip_special_tokens=self._skip,
        )
        self._window_ids = self._detokenizer.next_window(
            self._window_ids, [token_id], skip_special_tokens=self._skip
        )
        self._parser.read(events)
        self._num_tokens += 1
        self._note_answer()
        if not self._parser.is_inside_tag:
            self._borders.append((self._num_tokens, self._parser.parser_state))
        releasable = self._num_tokens - num_held_tokens
        while len(self._borders) > 1 and self._borders[1][0] <= releasable:
            self._borders.popleft()
        self.num_held_tokens = self._num_tokens - self._borders[0][0]

    def take_parser_state(self) -> ParserState:
        """Return where the chunk begins that is released now: all tokens but the held ones."""
        parser_state, self._begin = self._begin, self._borders[0][1]
        return parser_state

    def _note_answer(self) -> None:
        parts = self._parser.take()
        if self._parser.state.is_answer and not self.has_reasoning_ended:
            has_text = any(part.type != "reasoning" and part.text.strip() for part in parts)
            self.has_reasoning_ended = self._parser.parser_state.number > 0 or has_text
