"""Beam search: how clients of other servers ask for it, and what does not go with it."""

from __future__ import annotations

from typing import Any

from engine.errors import RequestError
from engine.validation.unsupported import means

NOT_WITH_BEAMS = (
    *("best_of", "stop", "structured_outputs", "thinking_token_budget"),
    *("logits_processors", "dry_multiplier"),
)


def with_beam_width(fields: dict[str, Any]) -> dict[str, Any]:
    """Return `fields` with vLLM's `use_beam_search` as `beam_width`: `best_of`, or else `n`.

    Fields of beam search that are None are left out: clients of other servers send them.

    Raises:
        RequestError: `use_beam_search` is neither true nor false, or there is only one beam.
    """
    for name in ("beam_width", "length_penalty", "early_stopping"):
        if fields.get(name, 0) is None:
            del fields[name]
    asked = fields.pop("use_beam_search", None)
    if asked is None or means(asked, False):
        return fields
    if not means(asked, True):
        raise RequestError("must be true or false", param="use_beam_search")
    if "beam_width" in fields:
        return fields
    width = fields.pop("best_of", None)
    fields["beam_width"] = (fields.get("n") or 1) if width is None else width
    if means(fields["beam_width"], 1):
        raise RequestError(
            "needs best_of or n above 1, the number of beams", param="use_beam_search"
        )
    return fields
