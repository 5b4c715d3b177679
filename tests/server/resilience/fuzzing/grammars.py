"""Grammars as clients send them, and mutants of these."""

from __future__ import annotations

import json
import random
from typing import Any

from engine.bench.tool_sets import ToolSets, calls_schema, calls_tag

_TOOLS = ToolSets(3).tools(3000)
_RIGHT: dict[str, list[str]] = {
    "json": [json.dumps(calls_schema(_TOOLS)), '{"type": "object"}', '{"enum": ["a", "b"]}'],
    "regex": [r"(\d{1,3}\.){3}\d{1,3}", r"[^a-z]*(foo|bar){2,5}?", r"(?i:a)\p{Lu}"],
    "choice": ['["left", "right"]', '["", "x", "é"]'],
    "grammar": [
        'root ::= "(" root ")" | [a-z]+ ("," ws [0-9]{1,9})*\nws ::= [ \\n]*',
        'start: A b\nA: /x+/ & ~/xx/\nb[lazy]: /.*y/ | "z"i',
    ],
    "structural_tag": [json.dumps(calls_tag(_TOOLS[:1]))],
}
# What leaves no choice for long, behind what the trial of a grammar does not reach.
_LEAD = "[a-z]{400}[0-9]"
_LITERALS = " ".join([json.dumps("9" * 1000)] * 30)
_BYTES = 16_000
_FORCING: list[tuple[str, str]] = [
    ("json", json.dumps({"const": "ab c" * (_BYTES // 4)})),
    ("json", json.dumps({"items": {"const": "9" * _BYTES}, "minItems": 9, "type": "array"})),
    ("regex", f"{_LEAD}(b ){{{_BYTES // 2}}}"),
    ("regex", f"{_LEAD}((b ){{300}}){{100}}"),
    ("choice", json.dumps(["a" * _BYTES, "a" * (_BYTES - 1) + "b"])),
    ("grammar", f'root ::= [a-z]{{400}} [0-9] ("b "){{{_BYTES // 2}}}'),
    ("grammar", f"start: /{_LEAD}/ {_LITERALS}"),
    ("grammar", f"start: /{_LEAD}/ {_LITERALS} {_LITERALS} {_LITERALS}"),  # too much
    ("grammar", f'start: /{_LEAD}/ r{{30000}}\nr: "b "'),  # too much
    ("grammar", f'start: /{_LEAD}/ r\nr: "b " r'),  # without an end
]
# Each text has very many parses; most draws, as those of the trial, end at once.
_AMBIGUOUS = [
    "s: s s s | s s | /[a-z ]/",
    "s: s s | c\nc: /[a-z]/",
    's: "(" s* ")" | c | s s\nc: /[a-z]/',
]
_PIECES = '()[]{}|*+?"\\/:=#~&^$.,0\n\u00e9\x00'


def right(rng: random.Random) -> dict[str, Any]:
    """Return a grammar that compiles."""
    kind = rng.choice(sorted(_RIGHT))
    return {"structured_outputs": {kind: rng.choice(_RIGHT[kind])}}


def forcing(rng: random.Random) -> dict[str, Any]:
    """Return a grammar that leaves no choice for long, for several sequences in the same steps."""
    kind, text = rng.choice(_FORCING)
    fields: dict[str, Any] = {"max_tokens": 1000, "n": rng.choice([1, 8])}
    if rng.random() < 0.3:
        fields["logprobs"] = 1  # then nothing is taken without a step
    return {"structured_outputs": {kind: text}, **fields}


def ambiguous(rng: random.Random) -> dict[str, Any]:
    """Return a grammar whose masks cost more with each token, for several sequences."""
    text = f'start: /[A-Z0-9]/ | "z" s\n{rng.choice(_AMBIGUOUS)}'
    fields: dict[str, Any] = {"min_tokens": 150, "max_tokens": 300, "n": rng.choice([1, 4])}
    return {"structured_outputs": {"grammar": text}, **fields}


def mutated(rng: random.Random) -> dict[str, Any]:
    """Return a grammar with a few faults, which may compile all the same."""
    kind = rng.choice(sorted(_RIGHT))
    text = rng.choice(_RIGHT[kind])
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(text) + 1)
        piece = text[at : at + rng.randint(1, 12)]
        change = rng.choice(["", piece * rng.choice([2, 30]), rng.choice(_PIECES)])
        text = text[:at] + change + text[at + (not change) :]
    if rng.random() < 0.1:
        text = "".join(map(chr, rng.choices(range(0xD7FF), k=rng.randint(0, 200))))
    return {"structured_outputs": {kind: text}, "max_tokens": rng.choice([1, 8])}
