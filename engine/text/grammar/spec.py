"""GrammarSpec: the grammar that the output of a request must match (structured output)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from engine.errors import RequestError

GrammarKind = Literal["json_schema", "regex", "choice", "grammar", "structural_tag"]

# Where a text must follow, llguidance finds all of it at once, and its tokens: up to 1 us per byte,
# in the engine's loop. JSON is bounded by its strings, which free white space separates. What other
# grammars force with many strings, or by repetition, is counted where it is found.
MAX_LITERAL_BYTES = 2**14
MAX_FORCED_BYTES = 2**15
MAX_CHARACTERS: dict[GrammarKind, int] = {
    "json_schema": 2**19,
    "regex": 2**15,
    "choice": 2**19,
    "grammar": 2**17,
    "structural_tag": 2**19,
}
_MAX_TAG_CHARACTERS = 256
MAX_WHITESPACE_CHARACTERS = 1024

_Text = Annotated[str, Field(max_length=max(MAX_CHARACTERS.values()))]


class GrammarTextError(ValueError):
    """A grammar cannot be used, for the reason and the position in the text."""


def check_literal(text: str) -> None:
    """Raise `GrammarTextError` if a text that must follow as it is is too long."""
    size = len(text.encode(errors="surrogatepass"))
    if size > MAX_LITERAL_BYTES:
        raise GrammarTextError(
            f"{text[:20]!r}... has {size} bytes; at most {MAX_LITERAL_BYTES} are allowed in one "
            "string"
        )


class GrammarSpec(BaseModel):
    """A grammar as the client wrote it, not yet compiled. Immutable.

    Attributes:
        kind: the language of `text`.
        text: a JSON schema, a regular expression, a JSON list of strings, a grammar in Lark or
            EBNF, or structural tags as JSON.
        strict: refuse a JSON schema with keywords that are not enforced, rather than ignore them.
        whitespace_pattern: regular expression of the blanks between two tokens of JSON; "" allows
            none. None: a space, or line feeds and an indentation, of bounded length.
        begin_after: the output is free until it contains this text; "" begins at once.
        reasoning_start: if set, what is before that begins with this text, and may be left out.
        opening: text that follows in any case, before what matches; only with `begin_after`.
        field: where the client gave it, for errors.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: GrammarKind
    text: _Text
    strict: bool = True
    whitespace_pattern: Annotated[str, Field(max_length=MAX_WHITESPACE_CHARACTERS)] | None = None
    begin_after: Annotated[str, Field(max_length=_MAX_TAG_CHARACTERS)] = ""
    reasoning_start: Annotated[str, Field(max_length=_MAX_TAG_CHARACTERS)] = ""
    opening: Annotated[str, Field(max_length=_MAX_TAG_CHARACTERS)] = ""
    field: Annotated[str, Field(max_length=_MAX_TAG_CHARACTERS)] = "structured_outputs"

    @property
    def body(self) -> GrammarSpec:
        """The grammar that begins at once."""
        return self.model_copy(update={"begin_after": "", "reasoning_start": "", "opening": ""})

    @property
    def key(self) -> tuple[str | bool | None, ...]:
        """What the compiled grammar depends on."""
        begin = self.begin_after, self.reasoning_start, self.opening
        return self.kind, self.text, self.strict, self.whitespace_pattern, *begin

    def error(self, text: str) -> RequestError:
        """Return the refusal of this grammar for the reason `text`."""
        return RequestError(text, param=self.field)
