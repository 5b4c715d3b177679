import math

import pytest
import torch
from torch import Tensor

from kernels import device
from kernels.sampling import logprobs as module
from kernels.sampling.logprobs import reference, token_logprobs
from tests.kernels.support import DEVICE, padded, randn
from tests.kernels.vast_memory import vast_zeros

# NumPy warns where the interpreter computes infinity or NaN as intended.
pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value):RuntimeWarning")


def tokens(*ids: int) -> Tensor:
    return torch.tensor(ids, device=DEVICE)


def assert_same(logits: Tensor, token_ids: Tensor, num_top: int) -> None:
    chosen, ranks, top_ids, top = token_logprobs(logits, token_ids, num_top)
    expected = reference(logits, token_ids, num_top)
    assert chosen.dtype == top.dtype == torch.float32
    assert ranks.dtype == torch.int32
    assert top_ids.dtype == torch.int64
    assert ranks.tolist() == expected[1].tolist()
    assert top_ids.tolist() == expected[2].tolist()
    # Near 0 the argument of the logarithm is a sum near 1, rounded to 24 bits.
    torch.testing.assert_close(chosen, expected[0], rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(top, expected[3], rtol=2e-6, atol=1e-6)


def test_the_reference_is_torchs_own() -> None:
    logits, token_ids = randn(3, 50), tokens(0, 7, 49)
    chosen, ranks, top_ids, top = reference(logits, token_ids, 5)
    logprobs = torch.log_softmax(logits, -1)
    torch.testing.assert_close(top, logprobs.topk(5).values)
    assert torch.equal(top_ids, logprobs.topk(5).indices)
    torch.testing.assert_close(chosen, logprobs[range(3), token_ids])
    order = logprobs.argsort(descending=True).tolist()
    assert ranks.tolist() == [order[i].index(token) + 1 for i, token in enumerate([0, 7, 49])]


@pytest.fixture(params=[None, (4, 64)], ids=["default", "small"])
def division(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param is not None:  # several chunks per row, and smaller groups
        monkeypatch.setattr(module, "settings", lambda vocab: request.param)


@pytest.mark.usefixtures("division")
@pytest.mark.parametrize("num_top", [0, 1, 5, 20, 32, 33])
@pytest.mark.parametrize("ties", [False, True], ids=["unique", "tied"])
def test_logprobs_and_ranks(ties: bool, num_top: int) -> None:
    logits = padded(randn(4, 301) * 3)
    if ties:
        logits = padded(logits.round())
    before = logits.clone()
    assert_same(logits, tokens(0, 5, 128, 300), num_top)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab", [1, 2, 16, 20, 33])
def test_a_tiny_vocabulary_is_reported_whole(vocab: int) -> None:
    logits = randn(2, vocab)
    logits[1] = 0.0
    assert_same(logits, tokens(0, vocab - 1), vocab)


def test_a_large_vocabulary() -> None:
    assert_same(randn(2, 32003) * 4, tokens(31999, 7), 20)


def test_zeros_of_both_signs_are_equal() -> None:
    logits = torch.full((1, 40), -1.0, device=DEVICE)
    logits[0, 30:35], logits[0, 3:6] = 0.0, -0.0
    chosen, ranks, top_ids, _ = token_logprobs(logits, tokens(34), 6)
    assert ranks.item() == 1
    assert top_ids.tolist() == [[3, 4, 5, 30, 31, 32]]
    assert chosen.item() == pytest.approx(-math.log(8 + 32 / math.e))


@pytest.mark.usefixtures("division")
def test_forbidden_tokens_and_nan_come_last() -> None:
    logits = torch.full((3, 150), -torch.inf, device=DEVICE)
    logits[:, [70, 149]] = tokens(1, 2).float()
    logits[1, :50], logits[2, 3] = torch.nan, torch.inf
    chosen, ranks, top_ids, top = token_logprobs(logits, tokens(70, 0, 149), 4)
    assert top_ids.tolist() == [[149, 70, 0, 1], [149, 70, 0, 1], [3, 149, 70, 0]]
    assert ranks.tolist() == [2, 3, 2]
    both = [2.0 - math.log(math.e + math.e**2), 1.0 - math.log(math.e + math.e**2)]
    assert top[:2].tolist() == [[*map(pytest.approx, both), -math.inf, -math.inf]] * 2
    assert top[2, 0] == 0.0
    assert chosen[0].item() == pytest.approx(both[1])
    assert chosen[1] == -math.inf


def test_a_row_that_allows_nothing_names_tokens_all_the_same() -> None:
    logits = torch.full((2, 60), -torch.inf, device=DEVICE)
    chosen, ranks, top_ids, top = token_logprobs(logits, tokens(9, 0), 3)
    assert top_ids.tolist() == [[0, 1, 2]] * 2
    assert ranks.tolist() == [1, 1]
    assert chosen.isnan().all()
    assert top.isnan().all()


def test_rows_that_lie_beyond_two_to_the_31() -> None:
    stride = 2**30 + 8
    memory = vast_zeros(4 * (2 * stride + 150)).view(torch.float32)
    logits = memory.as_strided((3, 150), (stride, 1))
    logits.copy_(randn(3, 150))
    assert_same(logits, tokens(4, 5, 6), 5)


def test_without_triton_the_reference_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "runs_triton", lambda tensor: False)
    monkeypatch.setattr(module, "_launch", None)
    assert_same(randn(2, 50), tokens(3, 4), 7)


def test_no_rows() -> None:
    shapes = [tuple(part.shape) for part in token_logprobs(randn(0, 8), tokens().long(), 3)]
    assert shapes == [(0,), (0,), (0, 3), (0, 3)]


def test_wrong_arguments_are_named() -> None:
    logits, ids = randn(2, 8), tokens(1, 2)
    for wrong, message in (
        (logits.half(), r"logits: must be torch\.float32"),
        (logits[0], "logits: must have shape"),
        (logits[:, :0], "logits: rows must not be empty"),
        (logits.t().contiguous().t(), "logits: the last dimension must be contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            token_logprobs(wrong, ids, 0)
    for wrong, message in (
        (ids.int(), r"token_ids: must be torch\.int64"),
        (ids[:1], r"token_ids: must have shape \[2\]"),
        (tokens(1, 9, 2, 9)[::2], "token_ids: must be contiguous"),
        (ids.to("meta"), "token_ids: must be on"),
    ):
        with pytest.raises(ValueError, match=message):
            token_logprobs(logits, wrong, 0)
    for num_top in (-1, 9):
        with pytest.raises(ValueError, match="num_top: must be 0 to 8"):
            token_logprobs(logits, ids, num_top)
