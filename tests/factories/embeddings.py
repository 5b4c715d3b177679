"""What an embedding must equal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel


def reference_embedding(model: PreTrainedModel, prompt: Sequence[int]) -> NDArray[np.float64]:
    """Return transformers' last hidden state of the last token [hidden_size], of length 1.

    Args:
        model: the decoder without a head, as `AutoModel` loads it.
        prompt: its token ids.
    """
    with torch.no_grad():
        hidden = model(torch.tensor([list(prompt)])).last_hidden_state[0, -1].double()
    found: NDArray[np.float64] = torch.nn.functional.normalize(hidden, dim=0).numpy()
    return found
