"""GrammarSpec: what the output of a request must match, whichever field said so."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from engine.errors import RequestError

GrammarKind = Literal["json_schema", "regex", "choice", "grammar", "structural_tag"]

MAX_GRAMMAR_CHARACTERS = 2**19
_MAX_TAG_CHARACTERS = 256

_Text = Annotated[str, Field(max_length=MAX_GRAMMAR_CHARACTERS)]


class GrammarTextError(ValueError):
    """A grammar cannot be used; the text says why, and where the fault is."""


class GrammarSpec(BaseModel):
    """A grammar as the client wrote it, not yet compiled. Immutable.

    Attributes:
        kind: the language of `text`.
        text: a JSON schema, a regular expression, a JSON list of strings, a grammar in Lark or
            EBNF, or structural tags as JSON.
        strict: refuse a JSON schema with keywords that are not enforced, rather than ignore them.
        begin_after: the output is free until it contains this text; "" begins at once.
        reasoning_start: if set, what is before that begins with this text, and may be left out.
        field: where the client gave it, for errors.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: GrammarKind
    text: _Text
    strict: bool = True
    begin_after: Annotated[str, Field(max_length=_MAX_TAG_CHARACTERS)] = ""
    reasoning_start: Annotated[str, Field(max_length=_MAX_TAG_CHARACTERS)] = ""
    field: Annotated[str, Field(max_length=_MAX_TAG_CHARACTERS)] = "structured_outputs"

    @property
    def key(self) -> tuple[str, str, bool, str, str]:
        """What the compiled grammar depends on."""
        return self.kind, self.text, self.strict, self.begin_after, self.reasoning_start

    def error(self, text: str) -> RequestError:
        """Return the refusal of this grammar for the reason `text`."""
        return RequestError(f"{self.field}: {text}")
