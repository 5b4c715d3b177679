"""The table of sampling settings on the device, and the codes that host and device share.

The scheduler's arrays, the tables of the slots and the warm-up are built from `SAMPLING_COLUMNS`: a
new setting is one line of `SamplingColumns`. Imports no torch: the scheduler runs without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Generic, Literal, NamedTuple, TypeVar, get_type_hints

import numpy as np

# Finish reasons of a sequence after a step; SKIPPED: no token was appended for its row.
SKIPPED, RUNNING, STOP, LENGTH = -1, 0, 1, 2

# Feature bits: what a sequence uses beside a draw; most use nothing.
#   ALLOWED     only the tokens in its `allowed_token_ids` may be drawn
#   BIAS        `logit_bias`
#   PENALTIES   repetition, presence or frequency penalty
#   MIN_TOKENS  the device forbids its stop tokens before `min_tokens`
#   FILTERS     top_k, top_p or min_p, of a sequence that is not greedy
#   LOGPROBS    its log-probabilities are reported
#   TRUNCATION  top_n_sigma or typical_p, of a sequence that is not greedy
#   BEAM        its log-probabilities are those that beams are ranked by
ALLOWED, BIAS, PENALTIES, MIN_TOKENS, FILTERS, LOGPROBS, TRUNCATION, BEAM = (
    1 << bit for bit in range(8)
)
# Features that change which token is drawn, and nothing where the most likely one is taken.
DRAW_FEATURES = FILTERS | TRUNCATION

# Magnitudes of numbers in float32; those beyond would be 0 and infinity, which forbid tokens.
NORMAL = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
_FACTORS = 1e-30, 1e30  # of logits, whose products are finite, too

Array = TypeVar("Array")


class Column(NamedTuple):
    """One sampling setting, a number per sequence.

    Attributes:
        dtype: of the arrays on the host and on the device.
        off: the value that changes nothing; of the temperature, greedy.
        on: a value that has an effect, for the warm-up.
        feature: the bit of a sequence whose value is not `off`; 0: none.
        bounds: least and largest magnitude; values other than 0 are brought within.
    """

    dtype: Literal["int32", "float32"]
    off: float
    on: float
    feature: int = 0
    bounds: tuple[float, float] = NORMAL


@dataclass(frozen=True, slots=True)
class SamplingColumns(Generic[Array]):
    """An array for each sampling setting, named as the request's field."""

    temperature: Annotated[Array, Column("float32", off=0, on=1, bounds=(1e-37, 1e37))]
    top_k: Annotated[Array, Column("int32", off=0, on=2, feature=FILTERS)]
    top_p: Annotated[Array, Column("float32", off=1, on=0.9, feature=FILTERS)]
    min_p: Annotated[Array, Column("float32", off=0, on=0.01, feature=FILTERS)]
    top_n_sigma: Annotated[Array, Column("float32", off=0, on=1, feature=TRUNCATION)]
    typical_p: Annotated[Array, Column("float32", off=1, on=0.9, feature=TRUNCATION)]
    # Divides positive and multiplies other logits of tokens of the prompt or the output.
    repetition_penalty: Annotated[Array, Column("float32", 1, 1.1, PENALTIES, _FACTORS)]
    # Subtracted from the logits of tokens of the output: once, and once for each occurrence.
    presence_penalty: Annotated[Array, Column("float32", off=0, on=0.1, feature=PENALTIES)]
    frequency_penalty: Annotated[Array, Column("float32", off=0, on=0.1, feature=PENALTIES)]


SAMPLING_COLUMNS: dict[str, Column] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(SamplingColumns, include_extras=True).items()
}
