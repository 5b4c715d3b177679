"""The sampling options of `trident run` and `trident chat`."""

from collections.abc import Sequence
from typing import Annotated

import typer

from client.client_protocol import CommonRequestOptions

System = Annotated[str, typer.Option(help="A system message to begin with.")]
MaxTokens = Annotated[
    int | None, typer.Option(help="Tokens to answer with at most; default: what fits.")
]
Temperature = Annotated[
    float | None, typer.Option(help="0 is greedy; default: what the model's makers chose.")
]
Seed = Annotated[
    int | None, typer.Option(help="Makes sampling repeatable: the same seed, the same answer.")
]
Stop = Annotated[
    list[str] | None, typer.Option(help="Text that ends the answer before it; repeatable.")
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
