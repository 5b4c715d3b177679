"""A random model that calls tools in the form of a family, as far as a grammar lets it."""

from __future__ import annotations

from typing import Any

from client.gateway.tool_parsers import TOOL_PARSERS, ToolChoice
from client.protocol import Section
from engine.text.grammar.compiler import GrammarCompiler
from engine.text.grammar.vocabulary import Vocabulary
from tests.client.gateway.tool_parsers.answers import Answer
from tests.client.gateway.tool_parsers.answers import read as read_sections
from tests.engine.text.output_parsing.test_families import HARMONY, encode, read
from tests.factories.grammars import RandomWriter, spec
from tests.factories.tagged import Form, format_of, tagged

TAGS: dict[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3_json": ("<|python_tag|>",),
    "llama4_pythonic": ("<|python_start|>", "<|python_end|>"),
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "openai": (*HARMONY, "<|return|>"),
    "pythonic": ("<|python_tag|>",),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
}
FLAG = {"type": "object", "properties": {"x": {"type": "boolean"}}, "additionalProperties": False}
WEATHER = {
    "type": "object",
    "properties": {
        "at": {"$ref": "#/$defs/place"},
        "city": {"enum": ["Rome", "Zürich"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "dry": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"place": FLAG},
}
SCHEMAS: dict[str, dict[str, Any]] = {"get_weather": WEATHER, "f_1": FLAG, "now": {}}
SCHEMAS["now"] = {"type": "object", "additionalProperties": False}


def tools(*, strict: bool = False) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
        for name, schema in SCHEMAS.items()
    ]


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    functions = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": functions}}


class Model:
    """A random model with the tags of a family."""

    def __init__(self, name: str, form: Form, end: str = "<|end|>") -> None:
        self.parser = TOOL_PARSERS[name]
        self._name = name
        self._detokenizer = tagged(TAGS[name], form)
        tokenizer = self._detokenizer.tokenizer
        ends = [tokenizer.added_token_ids[end]]
        vocabulary = Vocabulary.of(tokenizer, tokenizer.vocab_size, ends)
        self.compiler = GrammarCompiler(vocabulary)
        self._writer = RandomWriter(tokenizer, vocabulary)

    @property
    def before_calls(self) -> str:
        """Text that may stand before calls in a free answer."""
        return "" if self.parser.text else "Hello {[<tool "

    @property
    def is_bound(self) -> bool:
        """Whether all calls begin alike, so that those that are not allowed can be told."""
        return bool(self.parser.trigger or self.parser.text)

    def compiled(self, structure: Any) -> Any:
        return self.compiler.compile(spec(structural_tag={"format": structure})).result()

    def allows(self, choice: ToolChoice, text: str) -> bool:
        """Tell whether the answer may begin with `text`."""
        return self.permits(choice.structure(self.parser), text)

    def permits(self, structure: Any, text: str) -> bool:
        """Tell whether what follows `structure` may begin with `text`."""
        matcher = self.compiled(structure).deep_copy()
        return all(map(matcher.consume_token, encode(self._detokenizer, text)))

    def write(self, choice: ToolChoice, seed: int) -> str:
        """Return a whole answer as the model writes it."""
        text = self._writer.write(self.compiled(choice.structure(self.parser)), seed)
        assert text is not None
        return text

    def answer(self, choice: ToolChoice, text: str) -> Answer:
        """Return what a client gets of that."""
        found = read(self._detokenizer, text, format_of(self._detokenizer, "none", self._name))
        sections = [Section(each.type, each.index, each.text, each.tag) for each in found]
        return read_sections(self.parser, [sections], functions=choice.functions)
