"""What an answer is made of: reasoning, content and calls, from the sections of the text so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from client.gateway.tools.json_calls import Call, read_calls
from client.protocol import Section

CALL = "tool_call"
_SEPARATORS = " \t\r\n,;[]"


class Answer(NamedTuple):
    """What is known of an answer. That of a longer text begins with it, part by part."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[Call, ...] = ()


class ToolFormat(NamedTuple):
    """How calls are found.

    Attributes:
        names: functions that may be called.
        forced: a function whose arguments the content is, by a grammar.
        parallel: more than one call may be made; else only the first counts.
    """

    names: frozenset[str]
    forced: str | None = None
    parallel: bool = True


def read_answer(sections: Sequence[Section], form: ToolFormat, *, is_over: bool) -> Answer:
    """Return what `sections`, those of the whole text so far, hold.

    Calls are in the sections between the model's tags, or are the content, without tags, if that
    begins with one of a function that there is (Llama 3). What is between tags and no call is
    content, with its tags. Spaces around calls are not.

    Args:
        sections: of the text; parts of the same section have been joined.
        form: how calls are found.
        is_over: nothing follows.
    """
    reasoning, content, calls = "", "", list[Call]()
    shows_end_tag = False
    for number, section in enumerate(sections):
        ends = is_over or number < len(sections) - 1
        if section.type == "reasoning":
            reasoning += section.text
            shows_end_tag = False
            continue
        end_tag = section.tag if shows_end_tag and section.type != CALL else ""
        found, rest = _split(section, form, bare=not (calls or content.strip()), ends=ends)
        shows_end_tag = section.type == CALL and not found and bool(rest)
        calls += found
        content += end_tag + rest
    # Spaces at the end may turn out to be those before a call.
    if calls or not is_over:
        content = content.rstrip()
    return Answer(reasoning, content, tuple(calls if form.parallel else calls[:1]))


def _split(
    section: Section, form: ToolFormat, *, bare: bool, ends: bool
) -> tuple[Sequence[Call], str]:
    """Return the calls in a section, and what of it is content.

    Args:
        section: content, or what the model's tags mark as calls.
        form: how calls are found.
        bare: calls may stand in the content without tags.
        ends: nothing is added to the section.
    """
    text = section.text
    if form.forced is not None and section.type != CALL:
        arguments = text.strip()
        return ([Call(form.forced, arguments, ends)] if arguments else []), ""
    if section.type != CALL and not (bare and text.lstrip(_SEPARATORS).startswith("{")):
        # A list of calls begins with what does not tell yet.
        undecided = bare and not ends and text.strip() and not text.strip(_SEPARATORS)
        return (), "" if undecided else text
    found = read_calls(text)
    as_it_stands = section.tag + text if section.type == CALL else text
    if not found.calls:
        return (), as_it_stands if ends or not found.is_open else ""
    if section.type != CALL and found.calls[0].name not in form.names:
        return (), text
    if found.is_open and not ends:
        return found.calls, ""
    return found.calls, text[found.end :].lstrip(_SEPARATORS)
