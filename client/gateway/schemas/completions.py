"""`/v1/completions`: the body of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from client.gateway.schemas.sampling import RequestFields, Yes, fault, unsupported

Prompts = Annotated[
    str | list[str] | list[int] | list[list[int]],
    fault("must be a string, a list of strings, a list of token ids or a list of such lists"),
]


_Given = str | Sequence[str] | Sequence[int] | Sequence[list[int]]


def prompts_of(given: _Given) -> list[str | list[int]]:
    """Return the prompts in a `Prompts` one by one."""
    if isinstance(given, str):
        return [given]
    if given and isinstance(given[0], int):
        return [[each for each in given if isinstance(each, int)]]
    return [each for each in given if not isinstance(each, int)]


def names_of(field: str, given: _Given, number: int) -> dict[str, str]:
    """Return what a client calls the engine's inputs for a prompt of the `Prompts` in a field."""
    is_one = isinstance(given, str) or isinstance(given[0], int)
    return dict.fromkeys(("text_input", "input_ids"), field if is_one else f"{field}[{number}]")


class CompletionRequest(RequestFields):
    """A request to continue one or several prompts."""

    prompt: Prompts
    max_tokens: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    add_special_tokens: Annotated[
        Yes, unsupported("not supported: send token ids to do without them")
    ] = True

    def prompts(self) -> list[str | list[int]]:
        """Return them one by one."""
        return prompts_of(self.prompt)
