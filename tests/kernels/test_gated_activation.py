import math

import pytest
import torch

from kernels.cpu.activation import ACTIVATIONS, Activation
from kernels.gated_activation import gated_activation, reference, sigmoid_gate
from tests.kernels.support import DEVICE, assert_close, each_dtype, padded, randn, take_path
from tests.kernels.vast_memory import vast_zeros

each_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


@pytest.fixture(params=["triton", "torch", "cpu"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run every test on the kernel and on the CPU implementations."""
    take_path(request.param, monkeypatch)
    return request.param


def _formula(activation: Activation, x: float) -> float:
    if activation == "silu":
        return x / (1 + math.exp(-x))
    if activation == "gelu":
        return x * (1 + math.erf(x / math.sqrt(2))) / 2
    return x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


@each_activation
def test_the_reference_is_the_formula(activation: Activation) -> None:
    gate = torch.linspace(-6, 6, 101, device=DEVICE)
    expected = torch.tensor([_formula(activation, x) for x in gate.tolist()], device=DEVICE)
    assert_close(reference(torch.cat((gate, gate)), activation), expected * gate)


@each_dtype
@each_activation
@pytest.mark.parametrize("shape", [(1, 1), (7, 31), (3, 2, 100), (2, 0, 5), (1, 1025), (2, 2560)])
def test_any_shape(shape: tuple[int, ...], activation: Activation, dtype: torch.dtype) -> None:
    gate_up = padded(randn(*shape[:-1], 2 * shape[-1], dtype=dtype) * 3)
    before = gate_up.clone()
    out = gated_activation(gate_up, activation)
    assert out.dtype == dtype
    assert out.shape == shape
    assert out.is_contiguous()
    assert_close(out, reference(gate_up, activation))
    assert torch.equal(gate_up, before)


@each_activation
def test_the_kernel_is_torchs_own_to_the_last_bits(activation: Activation) -> None:
    gate = torch.cat((torch.linspace(-30, 30, 4001), randn(95).cpu())).to(DEVICE)
    out = gated_activation(torch.cat((gate, torch.ones_like(gate))), activation)
    expected = reference(torch.cat((gate, torch.ones_like(gate))), activation)
    # Far below zero the result is a difference of nearly equal numbers, in torch too.
    torch.testing.assert_close(out, expected, rtol=2e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:overflow")  # NumPy's, of the cube: infinity is fine
@each_activation
def test_large_gates_do_not_overflow(activation: Activation) -> None:
    gate = torch.tensor([-6e4, -1e3, -100.0, 100.0, 1e3, 6e4], dtype=torch.float16, device=DEVICE)
    out = gated_activation(torch.cat((gate, torch.ones_like(gate))), activation)
    assert out.tolist() == [0, 0, 0, *gate[3:].tolist()]
    wide = torch.tensor([-1e38, 1e38], device=DEVICE)
    out = gated_activation(torch.cat((wide, torch.ones_like(wide))), activation)
    assert out.tolist() == [0, wide[1].item()]
    nan = torch.tensor([float("nan"), 1.0], device=DEVICE)
    assert gated_activation(nan, activation).isnan().all()


def test_addresses_beyond_two_to_the_31() -> None:
    memory = vast_zeros(2**32 + 64).view(torch.float16)
    gate_up = memory.as_strided((3, 16), (2**30, 1)).copy_(randn(3, 16))
    assert_close(gated_activation(gate_up, "silu"), reference(gate_up, "silu"))


def test_wrong_arguments_are_named() -> None:
    ones = torch.ones(2, 4, device=DEVICE)
    with pytest.raises(ValueError, match="gate_up: the last dimension must be even"):
        gated_activation(ones[:, :3], "silu")
    with pytest.raises(ValueError, match="gate_up: the last dimension must be even and positive"):
        gated_activation(ones[:, :0], "silu")
    with pytest.raises(ValueError, match="gate_up: the last dimension must be even"):
        gated_activation(ones[0, 0], "silu")
    with pytest.raises(ValueError, match="gate_up: must be"):
        gated_activation(ones.int(), "gelu")
    with pytest.raises(ValueError, match="gate_up: the last dimension must be contiguous"):
        gated_activation(ones.mT, "gelu")
    with pytest.raises(ValueError, match="activation: must be one of silu, gelu, gelu_tanh"):
        gated_activation(ones, "exact")  # type: ignore[arg-type]


@each_dtype
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 3, 31), (2, 0, 4), (40, 8, 256)])
def test_sigmoid_gate_any_shape_matches_torch(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    tokens, heads, size = shape
    x, gate = (randn(*shape, dtype=dtype, seed=seed) * 3 for seed in (1, 2))
    strided = padded(torch.cat((x, gate), -1).view(tokens, 2 * heads * size))
    gate = strided.unflatten(-1, (heads, 2 * size))[..., size:]
    out = sigmoid_gate(x, gate)
    assert out.is_contiguous()
    # The sigmoid and the result are both rounded.
    torch.testing.assert_close(out, x * gate.sigmoid(), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@each_dtype
def test_sigmoid_gate_far_from_zero_is_open_or_closed(dtype: torch.dtype) -> None:
    gate = torch.tensor([-1e4, -200.0, 0.0, 200.0, 1e4], dtype=dtype, device=DEVICE).view(1, 1, 5)
    expected = torch.tensor([0, 0, 1, 2, 2], dtype=dtype, device=DEVICE).view(1, 1, 5)
    assert torch.equal(sigmoid_gate(torch.full_like(gate, 2), gate), expected)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("x", torch.ones(2, 3, 4, dtype=torch.int64), "x: must be"),
        ("x", torch.ones(2, 12), r"x: must have shape \[any, any, any\]"),
        ("x", torch.ones(2, 4, 3).mT, "x: must be contiguous"),
        ("gate", torch.ones(2, 3, 5), r"gate: must have shape \[2, 3, 4\]"),
        ("gate", torch.ones(2, 3, 4).half(), "gate: must be torch"),
        ("gate", torch.ones(2, 4, 3).mT, "gate: the last dimension"),
    ],
)
def test_sigmoid_gate_wrong_arguments_are_named(
    name: str, wrong: torch.Tensor, message: str
) -> None:
    arguments = {"x": torch.ones(2, 3, 4), "gate": torch.ones(2, 3, 4), name: wrong}
    with pytest.raises(ValueError, match=message):
        sigmoid_gate(**{key: x.to(DEVICE) for key, x in arguments.items()})
