"""ChunkParser: reasoning and tool calls in the tokens of a chunk or of an open turn."""

from __future__ import annotations

from collections.abc import Sequence

from engine.protocol.messages import OutputDetails, SequenceOutput
from engine.text.detokenizer import Detokenizer
from engine.text.output_parsing.parser import Event, OutputParser, ParserState, Section
from engine.text.output_parsing.parser_spec import ParserSpec

_MAX_TURN = 4096  # tokens of the prompt that may belong to the turn that it leaves open


def read_events(
    detokenizer: Detokenizer,
    markers: frozenset[int],
    window_ids: Sequence[int],
    new_ids: Sequence[int],
    *,
    final: bool,
    skip_special_tokens: bool,
    one_by_one: bool = False,
) -> list[Event]:
    """Return what `new_ids` add, with `markers` apart; together the shown texts are the `delta`.

    With `one_by_one` every token is an event of its own.
    """
    tokenizer = detokenizer.tokenizer
    events: list[Event] = []
    start = 0
    for index, token_id in enumerate(new_ids):
        is_marker = token_id in markers
        if not is_marker and not one_by_one:
            continue
        ids = new_ids[start : index + 1]
        text = detokenizer.delta(
            window_ids, ids, final=False, skip_special_tokens=skip_special_tokens
        )
        if is_marker:
            marker = tokenizer.token_text(token_id)
            is_shown = not skip_special_tokens or token_id not in tokenizer.special_ids
            before = text.removesuffix(marker) if is_shown else text
            events.append(Event(before, num_tokens=len(ids) - 1))
            events.append(Event(marker, token_id, is_shown))
        else:
            events.append(Event(text))
        window_ids = detokenizer.next_window(
            window_ids, ids, skip_special_tokens=skip_special_tokens
        )
        start = index + 1
    text = detokenizer.delta(
        window_ids, new_ids[start:], final=final, skip_special_tokens=skip_special_tokens
    )
    return [*events, Event(text, num_tokens=len(new_ids) - start)]


def cut(events: list[Event], num_characters: int) -> list[Event]:
    """Return `events` without the last `num_characters` of the text that they show.

    Their tokens still count.
    """
    kept = list(events)
    num_tokens = 0
    while num_characters and kept:
        event = kept.pop()
        num_tokens += event.num_tokens
        if not event.is_shown:
            continue
        if len(event.text) > num_characters:
            kept.append(Event(event.text[:-num_characters], num_tokens=0))
        num_characters = max(0, num_characters - len(event.text))
    return [*kept, Event("", num_tokens=num_tokens)]


class ChunkParser:
    """Reads the sections of a chunk. Immutable."""

    def __init__(self, detokenizer: Detokenizer, parser_spec: ParserSpec) -> None:
        self._detokenizer = detokenizer
        self._format = parser_spec

    def read(
        self,
        window_ids: Sequence[int],
        new_ids: Sequence[int],
        details: OutputDetails | SequenceOutput,
        *,
        skip_special_tokens: bool,
    ) -> list[Section]:
        """Return the sections in what `Detokenizer.text` returns, with the same arguments."""
        final = details.finish_reason is not None
        events = read_events(
            self._detokenizer,
            self._format.markers(skip_special_tokens),
            window_ids,
            new_ids[:-1] if details.omit_stop_token else new_ids,
            final=final,
            skip_special_tokens=skip_special_tokens,
            one_by_one=self._format.has_text_tags,
        )
        parser = OutputParser(self._format, ParserState(*details.parser_state))
        parser.read(cut(events, details.text_cut))
        parser.read([Event("", num_tokens=int(details.omit_stop_token))])
        return parser.finish() if final else parser.take()


def state_after_prompt(
    parser_spec: ParserSpec, detokenizer: Detokenizer, prompt_ids: Sequence[int]
) -> ParserState:
    """Return where the output begins; its number counts the tags of the turn that the prompt opens.

    Only what follows the last token that may start a turn is read: a template may end the prompt
    with a tag, and a client with an answer to go on with; what a user wrote before has no meaning.
    """
    turn = list(prompt_ids[-_MAX_TURN:])
    starts = [i for i, token_id in enumerate(turn, 1) if token_id in parser_spec.turn_ids]
    parser = OutputParser(parser_spec)
    parser.read(
        read_events(
            detokenizer,
            parser_spec.markers(skip_special_tokens=False),
            [],
            turn[max(starts, default=0) :],
            final=False,
            skip_special_tokens=False,
        )
    )
    return parser.parser_state
