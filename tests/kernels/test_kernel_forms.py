"""What requests ask for does not change the form of a kernel, which would compile it again."""

from __future__ import annotations

import torch

from kernels.sampling.logprobs import token_logprobs
from tests.kernels.kernel_forms import recorded_forms
from tests.kernels.support import randn


def test_any_number_of_logprobs_takes_one_form() -> None:
    logits = randn(3, 500)
    token_ids = torch.tensor([1, 2, 499], device=logits.device)
    with recorded_forms() as forms:
        token_logprobs(logits, token_ids, 0)
        without = len(forms)
        for num_top in (1, 2, 5, 16, 20, 32):
            token_logprobs(logits, token_ids, num_top)
    assert len(forms) == without + 1, list(forms.values())
