import pytest
import torch
from torch import Tensor

from kernels.attention.paged_attention import Span, paged_attention

SPAN = Span(query_start=0, query_end=2, num_keys=2, block_ids=None, first_row=0)


def test_query_heads_read_their_kv_head() -> None:
    """Head h reads KV head h // group: with one-hot values, the output names the head."""
    key = torch.zeros(1, 4, 3, 8)
    value = torch.zeros(1, 4, 3, 8)
    for head in range(3):
        value[:, :, head, head] = 1
    out = paged_attention(torch.randn(2, 6, 8), key, value, [SPAN], scale=1.0, sliding_window=None)
    assert out.argmax(-1).tolist() == [[0, 0, 1, 1, 2, 2]] * 2


@pytest.mark.parametrize(
    ("query", "key", "value", "message"),
    [
        (torch.ones(2, 4, 8).int(), torch.ones(1, 4, 2, 8), torch.ones(1, 4, 2, 8), "query: must"),
        (torch.ones(2, 8), torch.ones(1, 4, 2, 8), torch.ones(1, 4, 2, 8), "query: must have"),
        (torch.ones(2, 4, 8), torch.ones(1, 4, 2, 6), torch.ones(1, 4, 2, 6), "key_cache: must"),
        (torch.ones(2, 4, 8), torch.ones(1, 4, 2, 8), torch.ones(2, 4, 2, 8), "value_cache: must"),
        (torch.ones(2, 4, 8), torch.ones(1, 4, 3, 8), torch.ones(1, 4, 3, 8), "query: its 4 heads"),
        (
            torch.ones(2, 4, 8),
            torch.ones(1, 4, 2, 8).half(),
            torch.ones(1, 4, 2, 8).half(),
            "key_cache: must be torch.float32",
        ),
    ],
)
def test_wrong_arguments_are_named(query: Tensor, key: Tensor, value: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paged_attention(query, key, value, [SPAN], scale=1.0, sliding_window=None)
