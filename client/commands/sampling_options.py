"""The sampling options of `trident run` and `trident chat`."""

from collections.abc import Sequence
from typing import Annotated

import typer

from client.client_protocol import CommonRequestOptions

System = Annotated[str, typer.Option(help="System message at the start of the conversation.")]
MaxTokens = Annotated[
    int | None, typer.Option(help="Limit of output tokens; default: what fits into the context.")
]
Temperature = Annotated[
    float | None, typer.Option(help="Sampling temperature; 0: greedy; default: the model's own.")
]
Seed = Annotated[
    int | None, typer.Option(help="Seed of sampling: the same seed gives the same answer.")
]
Stop = Annotated[
    list[str] | None, typer.Option(help="Stop string: ends the answer before it; repeatable.")
]


def sampling_options(
    max_tokens: int | None,
    temperature: float | None,
    seed: int | None = None,
    stop: Sequence[str] | None = None,
) -> CommonRequestOptions:
    """Return the options that were given; the server's defaults apply to the others."""
    options = CommonRequestOptions(max_tokens=max_tokens)
    if temperature is not None:
        options["temperature"] = temperature
    if seed is not None:
        options["seed"] = seed
    if stop:
        options["stop"] = list(stop)
    return options
