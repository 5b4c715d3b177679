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
_PIECES = '()[]{}|*+?"\\/:=#~&^$.,0\n\u00e9\x00'


def right(rng: random.Random) -> dict[str, Any]:
    """Return a grammar that compiles."""
    kind = rng.choice(sorted(_RIGHT))
    return {"structured_outputs": {kind: rng.choice(_RIGHT[kind])}}


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
