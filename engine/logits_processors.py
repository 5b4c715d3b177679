"""The interface of logits processors: code of the user's own that adjusts the logits of requests.

An installed package offers one by an entry point of the group `trident.logits_processors`: a class,
or any function, that takes a `ProcessorContext` and returns a `LogitsProcessor`. It is called once,
when the engine starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, Field

from engine.text.tokenizer import Tokenizer
from engine.validation.limits import MAX_WORD_CHARACTERS

ENTRY_POINTS = "trident.logits_processors"

# What is added to the logits of one row; -inf forbids a token. Either the ids of some tokens and
# the value for each, or float [vocab_size]; None: nothing.
Adjustment: TypeAlias = "tuple[ArrayLike, ArrayLike] | NDArray[Any] | None"


@dataclass(frozen=True, slots=True)
class ProcessorContext:
    """What a processor may know of the model; `vocab_size` is the number of its logits."""

    tokenizer: Tokenizer
    vocab_size: int


@dataclass(slots=True, eq=False)
class ProcessorRow:
    """One sequence that asks for a processor, of which the next token is about to be drawn.

    Attributes:
        args: what the request gives the processor.
        token_ids: int32 [T], prompt and output, read-only and valid during the call alone.
        num_prompt_tokens: how many of them are the prompt.
        state: the processor's own, None at first. It lives as long as the sequence does.
    """

    args: Any
    token_ids: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    num_prompt_tokens: int = 0
    state: Any = None

    @property
    def prompt_token_ids(self) -> NDArray[np.int32]:
        """The tokens of the prompt."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> NDArray[np.int32]:
        """The output so far."""
        return self.token_ids[self.num_prompt_tokens :]


class LogitsProcessor(Protocol):
    """Adjusts the logits of the requests that ask for it, and of no other.

    It runs in the engine's loop: what it takes, each stream of the step waits for.
    """

    def validate(self, args: Mapping[str, Any]) -> None:
        """Check the arguments of a request, before it is queued.

        Raises:
            ValueError: they are wrong; its text is sent to the client.
        """

    def adjust(self, rows: Sequence[ProcessorRow]) -> Sequence[Adjustment]:
        """Return what to add to the logits of each of `rows`, after penalties.

        The result must depend on the arguments and the tokens of each row alone, not on the other
        rows. A row may come again with the same tokens: a sequence that is preempted draws again,
        and after an error each row is tried alone. Whichever fails then ends its request.
        """


class AskedLogitsProcessor(BaseModel):
    """A logits processor of an installed package, by the name of its entry point."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(max_length=MAX_WORD_CHARACTERS)]
    args: dict[str, Any] = {}
