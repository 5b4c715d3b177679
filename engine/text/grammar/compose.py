"""From a `GrammarSpec` to the one text that llguidance compiles."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from llguidance import LLMatcher

from engine.text.grammar.ebnf import is_ebnf, lark_of
from engine.text.grammar.json_schema import prepare_schema
from engine.text.grammar.regexes import portable
from engine.text.grammar.spec import GrammarSpec, GrammarTextError

_ANYTHING = "(?s:.*)"


def llguidance_texts(spec: GrammarSpec, special_tokens: Mapping[str, int]) -> Iterator[str]:
    """Yield the grammar of `spec`, then if there is one the same in another form, to be tried next.

    `special_tokens` are ids by text.

    Raises:
        GrammarTextError: it is wrong; the text names the place.
    """
    yield _text(spec, _grammars(spec, special_tokens), special_tokens)
    if spec.kind == "grammar" and is_ebnf(spec.text):
        # llguidance fails on some regular expressions that are made of parts.
        yield _text(spec, [_lark(lark_of(spec.text, large_lexemes=False))], special_tokens)


def _text(
    spec: GrammarSpec, grammars: list[dict[str, Any]], special_tokens: Mapping[str, int]
) -> str:
    if spec.begin_after:
        grammars[0]["name"] = "body"
        grammars.insert(0, _lark("start: head @body\n" + _up_to(spec.begin_after, special_tokens)))
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def _grammars(spec: GrammarSpec, special_tokens: Mapping[str, int]) -> list[dict[str, Any]]:
    match spec.kind:
        case "json_schema":
            return [{"json_schema": prepare_schema(spec.text, strict=spec.strict)}]
        case "regex":
            inner: list[dict[str, Any]] = json.loads(
                LLMatcher.grammar_from_regex(portable(spec.text))
            )["grammars"]
            return inner
        case "choice":
            return [_lark(_choice(json.loads(spec.text)))]
        case "grammar":
            return [_lark(lark_of(spec.text) if is_ebnf(spec.text) else spec.text)]
    return _structural_tag(spec, special_tokens)


def _lark(text: str, name: str | None = None) -> dict[str, Any]:
    return {"lark_grammar": text} | ({} if name is None else {"name": name})


def _choice(choices: list[str]) -> str:
    if not choices or not any(choices):
        raise GrammarTextError("must have at least one choice that is not empty")
    return "start: CHOICE\nCHOICE: " + " | ".join(map(_literal, choices))


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _up_to(tag: str, special_tokens: Mapping[str, int]) -> str:
    """Return the rule `head`: any text, up to and with the first `tag`."""
    if tag in special_tokens:
        return f"head: TEXT <[{special_tokens[tag]}]>\nTEXT: /{_ANYTHING}/\n"
    return f"head[lazy]: /{_ANYTHING}/ {_literal(tag)}\n"


def _structural_tag(spec: GrammarSpec, special_tokens: Mapping[str, int]) -> list[dict[str, Any]]:
    """Free text in which `begin` of a structure is followed by its schema and its `end`.

    A trigger is the start of some `begin`: as soon as it appears, one of these must follow.
    """
    structures, triggers = _tags(spec.text)
    lines = ["start: part* TEXT", f"part: {' | '.join(f'tag_{i}' for i in range(len(triggers)))}"]
    plain = [trigger for trigger in triggers if trigger not in special_tokens]
    others = "|".join(map(_regex, plain))
    lines.append(f"TEXT: /{_ANYTHING}/" + (f" & ~/(?s:.*({others}).*)/" if plain else ""))
    grammars = []
    for i, trigger in enumerate(triggers):
        begun = [
            place for place, each in enumerate(structures) if each["begin"].startswith(trigger)
        ]
        if not begun:
            raise GrammarTextError(f"triggers/{i}: begins none of the structures")
        if trigger in special_tokens:
            lines.append(f"head_{i}: TEXT <[{special_tokens[trigger]}]>")
        else:
            lines.append(f"head_{i}[lazy]: /{_ANYTHING}/ {_literal(trigger)}")
        bodies = []
        for place in begun:
            rest = structures[place]["begin"].removeprefix(trigger)
            end = structures[place]["end"]
            words = [_literal(rest)] if rest else [], [_end(end, special_tokens)] if end else []
            bodies.append(" ".join([*words[0], f"@body_{place}", *words[1]]))
        lines.append(f"tag_{i}: head_{i} ({' | '.join(bodies)})")
    for place, each in enumerate(structures):
        if not any(each["begin"].startswith(trigger) for trigger in triggers):
            raise GrammarTextError(f"structures/{place}/begin: starts with none of the triggers")
        try:
            schema = prepare_schema(json.dumps(each.get("schema", True)), strict=spec.strict)
        except GrammarTextError as error:
            raise GrammarTextError(f"structures/{place}/schema: {error}") from None
        grammars.append({"name": f"body_{place}", "json_schema": schema})
    return [_lark("\n".join(lines)), *grammars]


def _end(text: str, special_tokens: Mapping[str, int]) -> str:
    return f"<[{special_tokens[text]}]>" if text in special_tokens else _literal(text)


def _regex(text: str) -> str:
    return "".join(f"\\x{{{ord(each):x}}}" if not each.isalnum() else each for each in text)


def _tags(text: str) -> tuple[list[dict[str, Any]], list[str]]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarTextError(f"is not valid JSON: {error}") from None
    if isinstance(fields, Mapping) and "format" in fields:
        raise GrammarTextError('"format" is not supported; give "structures" and "triggers"')
    if not isinstance(fields, Mapping) or not (fields.keys() >= {"structures", "triggers"}):
        raise GrammarTextError('must be an object with "structures" and "triggers"')
    structures, triggers = fields["structures"], fields["triggers"]
    if not _is_list_of(triggers, str) or not all(triggers):
        raise GrammarTextError("triggers: must be a list of strings, none of them empty")
    if not _is_list_of(structures, dict):
        raise GrammarTextError("structures: must be a list of objects")
    for place, each in enumerate(structures):
        if extra := each.keys() - {"begin", "schema", "end"}:
            raise GrammarTextError(f"structures/{place}/{min(extra)}: unknown field")
        for name in ("begin", "end"):
            if not isinstance(each.setdefault(name, ""), str):
                raise GrammarTextError(f"structures/{place}/{name}: must be a string")
    return structures, triggers


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(x, kind) for x in value)
