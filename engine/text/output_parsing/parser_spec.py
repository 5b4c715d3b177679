"""ParserSpec: the reasoning and tool-call tags of a checkpoint, and what each of them begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Literal, NamedTuple

from engine.text.output_parsing.tags import (
    AUTO,
    FUNCTION,
    HARMONY,
    NONE,
    REASONING,
    TOOL_CALLS,
    UNPARSED_TOOL_CALLS,
    Kind,
    Tags,
)
from engine.text.stop.automaton import StopAutomaton
from engine.text.tokenizer import Tokenizer

_HEADER_STARTS, (_MESSAGE,), _MESSAGE_ENDS = HARMONY[0].starts, HARMONY[0].ends, HARMONY[1].ends
# By what a header has in it, the first that fits: indices of `_harmony`'s states.
_MESSAGE_STATES = ((" to=", 4), ("<|channel|>analysis", 3), ("", 2))

# By what is in the chat template, all of it; the first that fits. Names as in `TOOL_CALLS`; the
# forms of GLM 4.5 and Jamba have no parser.
_SIGNS = (
    ("openai", ("<|channel|>", "<|message|>", "functions.")),
    ("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    (NONE, ("<tool_call>", "<arg_key>")),
    (NONE, ("<tool_calls>",)),
    ("hermes", ("<tool_call>", '"arguments": ')),
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama4_pythonic", ("<|python_start|>",)),
    ("llama3_json", ('{"name": function name, "parameters"',)),
    ("pythonic", ("[func_name1(",)),
)


class _Part(NamedTuple):
    """A part of a section's text.

    Attributes:
        is_open: whether tags count in it; special tokens do everywhere.
        next: the part after a text.
    """

    is_open: bool
    next: Mapping[str, int]


# Outside the values of Qwen3-Coder's parameters, and in one.
_PARAMETERS = (
    _Part(True, {"<parameter=": 1}),
    _Part(False, {"</parameter>": 0, "</function>": 0}),
)


@dataclass(frozen=True)
class State:
    """What text is in, and where each tag leads from there.

    Attributes:
        kind: of the section; a `header` is no section, but the start of one.
        next: the state after a tag.
        inner: the state after a text that is a part of the section, in the same section.
        text_tags: finds these texts, and those of the tags that are no tokens of their own.
        is_answer: whether the text is the answer, if no reasoning follows.
    """

    kind: Kind | Literal["header"]
    next: Mapping[str, int]
    inner: Mapping[str, int]
    text_tags: StopAutomaton
    is_answer: bool = False

    @property
    def end_tag(self) -> str:
        """The tag after which the text is content; for reasoning."""
        return next(tag for tag, number in self.next.items() if number == 0)

    def after(self, tag: str, header: str) -> int:
        """Return the state after `tag`; `header` is the text of the header that it ends."""
        if self.kind != "header":
            return self.next[tag]
        return next(state for part, state in _MESSAGE_STATES if part in header)


class ParserSpec:
    """The states of a text with tags; the first is content outside all tags.

    A tag that is an added token of the vocabulary is that token, however it might be spelt out
    otherwise; other tags are found in the text. Inside reasoning, the start of a tool call counts
    if it is a special token: what is no special token may be a part of the thoughts. It counts
    inside a tool call whose start was found in the text, which may be a part of the answer.

    In a tool call a tag that is no special token does not count in a string, or in the value of a
    parameter of Qwen3-Coder's: it is a part of it.

    Attributes:
        states: by number.
        tag_of: the tags that are tokens.
        turn_ids: special tokens, and added ones of the chat template, that are in no tag; most
            templates start each turn with one of them.
        has_reasoning: whether reasoning may come.
        has_text_tags: whether a tag may be no token of its own.
    """

    def __init__(self, tokenizer: Tokenizer, reasoning: str = AUTO, tool_calls: str = AUTO) -> None:
        """Find the tags of a checkpoint.

        Args:
            tokenizer: its own, with the chat template.
            reasoning: a name of `REASONING`; `auto`: those tags that are tokens of the vocabulary,
                or in the chat template; `none`.
            tool_calls: a name of `TOOL_CALLS`, or as before.
        """
        self._tokenizer = tokenizer
        ids = tokenizer.added_token_ids
        chosen = [
            *_chosen(reasoning, REASONING, tokenizer),
            *_chosen(tool_calls, TOOL_CALLS, tokenizer, UNPARSED_TOOL_CALLS),
        ]
        # Of two that start alike, the one whose end is known too.
        chosen.sort(key=lambda tags: not tags.ends)
        if set(HARMONY) & set(chosen):
            self.states = _harmony(self._state)
        else:
            self.states = self._states(list(dict.fromkeys(chosen)))
        tags = {tag for state in self.states for tag in state.next}
        self.tag_of = {ids[tag]: tag for tag in tags if tag in ids}
        template, special = tokenizer.chat_template_text, tokenizer.special_ids
        turns = (i for token, i in ids.items() if i in special or token in template)
        parts = {i for token, i in ids.items() if any(token in tag for tag in tags)}
        self.turn_ids = frozenset(turns) - parts
        self.has_text_tags = not tags <= ids.keys()
        self.has_reasoning = any(state.kind == "reasoning" for state in self.states)
        self._markers = [frozenset(self.tag_of), special | self.tag_of.keys()]

    def end_ids(self, state: int, begun: str = "") -> list[int]:
        """Return the tokens of the tag that ends `state`, which is reasoning.

        Args:
            begun: the end of the text; what it has of the tag already is left out.
        """
        tag = self.states[state].end_tag
        rest = tag[len(begun) :] if begun != tag and tag.startswith(begun) else tag
        return self._tokenizer.encode(rest, add_special_tokens=False)

    @property
    def reasoning_end_ids(self) -> frozenset[int]:
        """The tokens of all tags that end reasoning."""
        states = (number for number, state in enumerate(self.states) if state.kind == "reasoning")
        return frozenset(token_id for state in states for token_id in self.end_ids(state))

    def markers(self, skip_special_tokens: bool) -> frozenset[int]:
        """Return the tokens that may have a meaning beside their text."""
        return self._markers[skip_special_tokens]

    def _states(self, tag_pairs: list[Tags]) -> tuple[State, ...]:
        starts: dict[str, int] = {}
        for number, tags in enumerate(tag_pairs, start=1):
            for tag in tags.starts:
                starts.setdefault(tag, number)
        ids, special = self._tokenizer.added_token_ids, self._tokenizer.special_ids
        calls = {
            tag: number
            for tag, number in starts.items()
            if tag_pairs[number - 1].kind == "tool_call" and tag in ids
        }
        interrupts = {tag: number for tag, number in calls.items() if ids[tag] in special}
        states = [self._state("content", starts, is_answer=True)]
        inner: list[State] = []  # states of parts of sections, after the others
        for number, tags in enumerate(tag_pairs, start=1):
            ends = dict.fromkeys(tags.ends, 0) or dict.fromkeys(tags.starts, number)
            others = interrupts if tags.kind == "reasoning" else {}
            if tags.kind == "tool_call" and ids.keys().isdisjoint(tags.starts):
                others = calls
            following = {**others, **ends}
            always = {tag: state for tag, state in following.items() if ids.get(tag) in special}
            is_xml = FUNCTION in tag_pairs and tags.ends == FUNCTION.ends
            parts = _PARAMETERS if is_xml else _strings(tags.quotes)
            first = len(tag_pairs) + 1 + len(inner)
            numbers = [number, *range(first, first + len(parts) - 1)]
            own = [
                self._state(
                    tags.kind,
                    following if part.is_open else always,
                    {text: numbers[index] for text, index in part.next.items()},
                    is_answer=tags.kind == "content",
                )
                for part in parts
            ]
            states.append(own[0])
            inner += own[1:]
        return (*states, *inner)

    def _state(
        self,
        kind: Kind | Literal["header"],
        following: Mapping[str, int],
        inner: Mapping[str, int] = MappingProxyType({}),
        *,
        is_answer: bool = False,
    ) -> State:
        spelt = (tag for tag in following if tag not in self._tokenizer.added_token_ids)
        return State(kind, following, inner, StopAutomaton([*spelt, *inner]), is_answer)


def _strings(quotes: str) -> tuple[_Part, ...]:
    """Return the parts of a text outside strings, and in them.

    A string with a line feed is none of JSON's, and may never end: in the rest of it tags count.
    """
    parts = [_Part(True, {quote: 2 * number + 1 for number, quote in enumerate(quotes)})]
    for quote in quotes:
        state = len(parts)
        escapes = (f"\\{quote}", "\\\\")
        parts.append(_Part(False, {quote: 0, **dict.fromkeys(escapes, state), "\n": state + 1}))
        parts.append(_Part(True, {quote: 0, **dict.fromkeys(escapes, state + 1)}))
    return tuple(parts)


def _harmony(state: Callable[..., State]) -> tuple[State, ...]:
    headers = dict.fromkeys(_HEADER_STARTS, 1)
    after_message = {**headers, **dict.fromkeys(_MESSAGE_ENDS, 0)}
    return (
        state("content", headers),
        state("header", {_MESSAGE: 0}),
        state("content", after_message, is_answer=True),
        state("reasoning", after_message),
        state("tool_call", after_message),
    )


def _chosen(
    name: str,
    known: Mapping[str, tuple[Tags, ...]],
    tokenizer: Tokenizer,
    others: Iterable[Tags] = (),
) -> Iterable[Tags]:
    if name == NONE:
        return ()
    if name != AUTO:
        return known[name]
    template, ids = tokenizer.chat_template_text, tokenizer.added_token_ids
    if all(tag in ids for tag in (*_HEADER_STARTS, _MESSAGE)):
        return HARMONY

    def has_one(tags: tuple[str, ...]) -> bool:
        return any(tag in ids or tag in template for tag in tags)

    every = dict.fromkeys(chain(chain.from_iterable(known.values()), others))
    return [
        tags
        for tags in every
        if tags not in HARMONY and has_one(tags.starts) and (not tags.ends or has_one(tags.ends))
    ]


def tool_call_parser(tokenizer: Tokenizer, setting: str) -> str:
    """Return the name of the checkpoint's tool-call parser, as vLLM has it; `none` if unknown.

    Args:
        tokenizer: with the chat template.
        setting: a name, or `auto`: by the chat template.
    """
    if setting != AUTO:
        return setting
    template = tokenizer.chat_template_text
    fitting = (name for name, signs in _SIGNS if all(sign in template for sign in signs))
    return next(fitting, NONE) if "tools" in template else NONE
