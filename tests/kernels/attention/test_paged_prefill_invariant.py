"""Prefill attention of a token that depends on its own sequence alone, to the last bit."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from kernels import device
from tests.kernels.attention.test_paged_prefill import CHUNKS, LENGTHS, dense, prefill, windowed
from tests.kernels.support import assert_close, each_dtype, randn


@each_dtype
@pytest.mark.parametrize("window", [None, 20])
def test_a_token_alone_gets_the_same_bits_as_in_any_chunk(
    window: int | None, dtype: torch.dtype
) -> None:
    case = windowed(CHUNKS, LENGTHS, window, dtype=dtype)
    query = randn(sum(CHUNKS), 6, 64, dtype=dtype, seed=3)
    options = {"sliding_window": window, "is_invariant": True}
    with patch.object(device, "limits", return_value=replace(device.HOPPER, num_sms=1)):
        together = prefill(query, case, CHUNKS, **options)
    assert_close(together, dense(query, case, CHUNKS, sliding_window=window))
    first = 0
    for row, (chunk, length) in enumerate(zip(CHUNKS, LENGTHS, strict=True)):
        for token in range(0, chunk, 7):
            alone = replace(
                case,
                block_tables=case.block_tables[row : row + 1],
                seq_lens=torch.full_like(case.seq_lens[:1], length - chunk + token + 1),
            )
            own = query[first + token : first + token + 1]
            assert torch.equal(prefill(own, alone, [1], **options)[0], together[first + token])
        first += chunk
