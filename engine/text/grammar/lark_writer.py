"""LarkWriter: writes a grammar for llguidance, of texts, tokens, free text and JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from llguidance import LLMatcher

from engine.text.grammar.json_schema import prepare_schema
from engine.text.grammar.regexes import portable
from engine.text.grammar.spec import check_literal

_ANYTHING = "(?s:.*)"


def literal(text: str) -> str:
    """Return `text` as a string of a grammar; raises `GrammarTextError` if it is too long."""
    check_literal(text)
    return json.dumps(text, ensure_ascii=False)


class LarkWriter:
    """Collects rules. Its methods return expressions for use in other rules.

    Attributes:
        grammars: of JSON schemas and regular expressions, which the rules name.
    """

    def __init__(
        self,
        special_tokens: Mapping[str, int],
        eos_token_ids: Collection[int],
        whitespace_pattern: str | None = None,
    ) -> None:
        """Write for a vocabulary; `special_tokens` are no text, but named by id.

        `whitespace_pattern` is that of all schemas, as in `GrammarSpec`.
        """
        self.grammars: list[dict[str, Any]] = []
        self._special = special_tokens
        self._inside = set(special_tokens.values()) - set(eos_token_ids)
        self._whitespace_pattern = whitespace_pattern
        self._lines: list[str] = []
        self._names: dict[str, str] = {}
        longest_first = sorted(special_tokens, key=len, reverse=True)
        self._tokens = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def grammar(self, start: str) -> str:
        """Return all rules; the text matches the expression `start`."""
        return "\n".join([f"start: {start}", *self._lines])

    def text(self, text: str) -> str:
        """Return this very text; what is a special token in it is that token."""
        parts, position = [], 0
        for found in self._tokens.finditer(text):
            parts += [literal(text[position : found.start()])] if found.start() > position else []
            parts.append(f"<[{self._special[found[0]]}]>")
            position = found.end()
        parts += [literal(text[position:])] if position < len(text) else []
        return " ".join(parts) or '""'

    def regex(self, pattern: str) -> str:
        """Return what matches a regular expression; special tokens do not."""
        key = f"regex: {pattern}"
        if key not in self._names:
            name = self._names[key] = f"regex_{len(self.grammars)}"
            (made,) = json.loads(LLMatcher.grammar_from_regex(portable(pattern)))["grammars"]
            self.grammars.append({**made, "name": name})
        return f"@{self._names[key]}"

    def schema(self, schema: Any, *, strict: bool) -> str:
        """Return the JSON of a schema; raises `GrammarTextError` as `prepare_schema`."""
        key = json.dumps([schema, strict])
        if key not in self._names:
            name = self._names[key] = f"json_{len(self.grammars)}"
            prepared = prepare_schema(
                json.dumps(schema), strict=strict, whitespace_pattern=self._whitespace_pattern
            )
            self.grammars.append({"name": name, "json_schema": prepared})
        return f"@{self._names[key]}"

    def free(self, without: Sequence[str] = ()) -> str:
        """Return any text and tokens, but for what ends a sequence and for the texts `without`."""
        text, others = self._free_parts(without)
        # Two pieces of text never meet, or one of `without` might lie across them.
        return f"({text}? {others})* {text}?" if others else text

    def up_to(self, end: str, without: Sequence[str] = ()) -> str:
        """Return free text up to and with the first `end`; none of `without` is in it."""
        token = self._tokens.search(end)
        others = [each for each in without if each != end and not self._tokens.match(each)]
        if token is None:
            body = self._rule("HEAD", f"/{_ANYTHING}/{_unlike(others)}")
            head = self._rule("head", f"{body} {literal(end)}", lazy=True)
            chunk, tokens = self._free_parts([*without, end])
        else:
            plain, rest = end[: token.start()], end[token.start() :]
            chunk, tokens = self._free_parts([*without, rest])
            body = f"/{_ANYTHING}{_regex(plain)}/{_unlike(others)}"
            head = self._rule("HEAD", body) if plain else chunk
            head = f"{head} {self.text(rest)}"
        return f"({chunk}? {tokens})* {head}" if tokens else head

    def _free_parts(self, without: Sequence[str]) -> tuple[str, str]:
        """Return a piece of text, and a special token; "" if there is none."""
        plain = []
        ids = set(self._inside)
        for text in without:
            first = self._tokens.match(text)
            if first is None:
                plain.append(text)
            else:
                ids.discard(self._special[first[0]])
        chunk = self._rule("TEXT", f"/{_ANYTHING}/{_unlike(plain)}")
        return chunk, f"<[{','.join(map(str, sorted(ids)))}]>" if ids else ""

    def _rule(self, kind: str, content: str, *, lazy: bool = False) -> str:
        """Return the name of the rule with this content."""
        key = f"{kind}{lazy}: {content}"
        if key not in self._names:
            name = self._names[key] = f"{kind}_{len(self._names)}"
            self._lines.append(f"{name}{'[lazy]' if lazy else ''}: {content}")
        return self._names[key]


def _unlike(texts: Sequence[str]) -> str:
    """Return the condition that none of `texts` is in a piece of text."""
    return f" & ~/(?s:.*({'|'.join(map(_regex, texts))}).*)/" if texts else ""


def _regex(text: str) -> str:
    return "".join(f"\\x{{{ord(each):x}}}" if not each.isalnum() else each for each in text)
