"""Processes weights after loading: to the linear method of their device, or to fewer bits.

On a CPU the faster of our GEMM and oneDNN's is found by their time on this machine.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import cast

import msgspec
import torch
from torch import Tensor, nn

from engine.config.setting_types import Quantization
from engine.errors import UnsupportedError
from engine.layers.experts import Experts
from engine.layers.integer_weight import IntegerWeight
from engine.layers.linear.cpu_packed import CpuPackedLinear
from engine.layers.linear.int8 import Int8Linear, multiplies_int8
from engine.layers.linear.linear import Gated, GatedLinear, Linear
from engine.layers.linear.onednn import OneDnnLinear, can_pack
from engine.layers.mlp import GatedMLP
from engine.layers.state_mixer import StateMixer
from engine.layers.vocabulary import LMHead
from engine.models.causal_lm import CausalLM
from engine.models.decoder import DecoderLayer, FusedLayers, can_fuse
from engine.models.linear_methods import LinearMethods, fuse_norms, fuse_quantisation
from engine.quantization.experts import QuantizedExperts
from engine.quantization.linear import QuantizedLinear
from kernels.cpu import linear as cpu_gemm
from kernels.cpu.activation import Activation
from kernels.cpu.large_pages import LargePages
from kernels.device import has_triton


def check_quantization(
    quantization: Quantization | None, device: torch.device, dtype: torch.dtype
) -> None:
    """Raise `UnsupportedError` if weights of `dtype` cannot be quantised so on `device`."""
    if quantization is None:
        return
    if quantization == "fp8":
        if not has_triton(device):
            raise UnsupportedError(
                "fp8 is for GPUs only; set it to int8, or leave it out",
                param="quantization",
            )
        if dtype == torch.float32:
            raise UnsupportedError(
                "fp8 needs a dtype of 16 bits; set dtype to bfloat16, or leave it out",
                param="quantization",
            )
        return
    if device.type != "cpu":
        raise UnsupportedError(
            f"{quantization} is for CPUs only; leave it out, or set device to cpu",
            param="quantization",
        )
    if cpu_gemm.serves(torch.empty(0, 0, dtype=dtype), device):
        return
    if quantization == "int4":
        raise UnsupportedError(
            "int4 needs a dtype other than float32, a CPU with AVX2, and the kernels "
            "that `python -m kernels.cpu` builds; leave it out",
            param="quantization",
        )
    if not multiplies_int8():
        raise UnsupportedError(
            "int8 needs a CPU that multiplies 8-bit integers exactly (x86: VNNI), or "
            "AVX2, a dtype other than float32 and the kernels that `python -m kernels.cpu` builds; "
            "leave it out",
            param="quantization",
        )


def check_deterministic(model: CausalLM, device: torch.device) -> None:
    """Raise `UnsupportedError` if `model` cannot be deterministic on `device`.

    The weights of `model` may be on any device.
    """
    if has_triton(device):
        return
    modules = [
        module.plain if isinstance(module, (QuantizedLinear, QuantizedExperts)) else module
        for module in model.modules()
    ]
    linears = [module for module in modules if isinstance(module, Linear)]
    mixtures = [module for module in modules if isinstance(module, Experts)]
    weights = [model.model.embed_tokens.rows, *(linear.weight for linear in linears)]
    if (
        not all(cpu_gemm.runs(weight, device) for weight in weights)
        or not all(
            cpu_gemm.can_gate(len(each.weight) // 2)
            for each in linears
            if isinstance(each, GatedLinear)
        )
        or not all(
            cpu_gemm.runs(each.gate_up[0], device) and cpu_gemm.can_gate(each.down.shape[2])
            for each in mixtures
        )
    ):
        raise UnsupportedError(
            "on a CPU it needs the kernels that `python -m kernels.cpu` builds, and projections "
            "with a multiple of 4 inputs, or of 16 in an MLP; leave it out",
            param="deterministic",
        )


class WeightProcessor:
    """Replaces the loaded projections of a model by the linear methods of its device.

    Quantised projections stay as they are stored if there is a GEMM of ours for them, which is
    never in float32; the others are dequantised to the model's dtype first.

    With `quantization` all are quantised, on a CPU including the head: in 8 bits it adds little to
    the error of the layers, and is a large part of what a step of few sequences reads.

    Without `own_gemm`, oneDNN's GEMM serves in place of ours where it has one.

    With `deterministic`, which `check_deterministic` must allow, a token's logits depend on its own
    sequence alone, to the last bit: our own GEMM serves, and on a CPU the layers are fused.

    Attributes:
        num_bytes_dequantized: of weights that have been dequantised so far.
    """

    def __init__(
        self,
        model: CausalLM,
        quantization: Quantization | None,
        *,
        deterministic: bool = False,
        own_gemm: bool = True,
    ) -> None:
        device = model.model.embed_tokens.weight.device
        self._model = model
        self._methods = LinearMethods(device, quantization, deterministic, own_gemm)
        self._pages = LargePages()
        self.num_bytes_dequantized = 0

    def process(self, module: nn.Module) -> None:
        """Convert the weights below `module`, a layer of the model, which must be loaded.

        The weight of each is freed before the next is processed.

        Raises:
            UnsupportedError: this machine cannot quantise a projection of this shape.
            CheckpointError: a tensor of a quantised projection is broken.
        """
        for name in [name for name, _ in module.named_children()]:
            child = module.get_submodule(name)
            if isinstance(child, (QuantizedLinear, QuantizedExperts)):
                method = self._placed(self._methods.of_stored(child))
                if method is not None:
                    setattr(module, name, method)
                    continue
                self.num_bytes_dequantized += child.num_bytes_dequantized
                child = child.dequantized()
                setattr(module, name, child)
            if not isinstance(child, (Linear, Experts)):
                self.process(child)
            elif (method := self._placed(self._methods.of_layer(child))) is not None:
                setattr(module, name, method)
        if isinstance(module, StateMixer):
            module.process_weights(invariant=self._methods.deterministic)
        if isinstance(module, GatedMLP):
            fuse_quantisation(module)
        if isinstance(module, DecoderLayer):
            fuse_norms(module)

    def finish(
        self, read_head: Callable[[slice], IntegerWeight | None] = lambda rows: None
    ) -> None:
        """Convert the layers that have not been, and the head.

        A tied head is a processed copy: the embedding needs plain rows. If all layers can be fused,
        the model runs them in one operation afterwards.

        Args:
            read_head: returns the integers that the checkpoint has for rows of the head; None: it
                has none.

        Raises:
            UnsupportedError, CheckpointError: as `process`.
        """
        model = self._model
        self.process(model.model)
        own = model.lm_head if isinstance(model.lm_head, LMHead) else None
        rows = (own or model.model.embed_tokens).rows
        tokens = model.spec.vocabulary
        own_rows = slice(0, None)
        if tokens is not None:
            own_rows = slice(tokens.indices.start, tokens.indices.stop)
        stored = self._methods.of_stored_head(rows, partial(read_head, own_rows))
        head = stored or self._methods.of_head(rows)
        head = self._placed(head)
        if own is None:
            model.model.embed_tokens.head = head
        else:
            model.lm_head = head or own
        layers = [cast(DecoderLayer, layer) for layer in model.model.layers]
        if can_fuse(layers):
            model.model.fused = FusedLayers(layers, invariant=self._methods.deterministic)

    def _placed(self, method: nn.Module | None) -> nn.Module | None:
        if isinstance(method, CpuPackedLinear):
            method.move(self._pages)
        return method


def num_bytes_while_loading(
    model: CausalLM,
    quantization: Quantization | None,
    device: torch.device,
    *,
    deterministic: bool = False,
) -> int:
    """Return the most bytes that the weights of `model` take on `device` while they are processed.

    On a CPU, and with `quantization` on a GPU, each layer is processed when it has been loaded, and
    takes memory only from then on. On a GPU quantised weights of all layers are loaded first.

    Args:
        model: may be on the meta device.
    """
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    quantized = [
        module
        for module in model.modules()
        if isinstance(module, (QuantizedLinear, QuantizedExperts))
    ]
    methods = LinearMethods(device, quantization, deterministic, own_gemm=True)
    projections_of = [
        [
            module
            for module in layer.modules()
            if isinstance(module, (Linear, Experts, QuantizedLinear, QuantizedExperts))
        ]
        for layer in model.model.layers
    ]
    if device.type != "cpu":
        every = [module for projections in projections_of for module in projections]
        # All as it is stored, then all processed; FP8 made of floats is never all floats.
        more = sum(methods.num_bytes(module) - _num_bytes(module) for module in every)
        if quantization is None:
            more = max(more, 0)
        # A projection while it is unpacked, or read and quantised.
        return num_bytes + more + max(map(methods.num_bytes_while_processed, quantized), default=0)
    largest = 0
    for projections in projections_of:
        loaded = sum(map(_num_bytes, projections))
        largest = max(largest, loaded)
        num_bytes += sum(map(methods.num_bytes, projections)) - loaded
    # What a projection stands for is computed in float32.
    largest += max(
        (
            max(2 * module.num_bytes_dequantized, module.num_bytes_while_dequantized)
            for module in quantized
        ),
        default=0,
    )
    head = model.lm_head if isinstance(model.lm_head, LMHead) else model.model.embed_tokens
    return num_bytes + max(largest, methods.num_bytes_of_head(head.rows))


def _num_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


_ROWS = (1, 4, 16, 64, 512)
_MOST_BYTES = 16 * 2**20  # of a weight that is timed; a larger one is timed in part
# Of all projections. Less is so fast that the time between GEMMs is the larger part of a step,
# which ours keeps short.
_LEAST_BYTES = 64 * 2**20
_REPEATS = 4
# Ours can be fused to whole layers, which saves more than this.
_GAIN = 1.05


class Shape(msgspec.Struct, frozen=True):
    """A projection: y = x W^T, or with an activation of the first half of y, the gates."""

    out_features: int
    in_features: int
    activation: Activation | None


class GemmChoice(msgspec.Struct, frozen=True):
    """Which GEMM serves on a CPU.

    Attributes:
        own_gemm: whether that of `kernels.cpu.linear` does, oneDNN's otherwise.
        speed: of ours over oneDNN's, by the number of rows, for all projections of the model.
    """

    own_gemm: bool
    speed: dict[int, float]

    def summary(self) -> str:
        """Return one line for the log."""
        figures = ", ".join(f"{speed:.2f}x at {rows}" for rows, speed in self.speed.items())
        chosen = "trident" if self.own_gemm else "oneDNN"
        return f"CPU GEMM backend: {chosen} (trident over oneDNN: {figures} tokens in a step)"


def projection_shapes(model: CausalLM) -> Counter[Shape]:
    """Return how many projections of each shape `model` has, those of experts left out."""
    shapes = Counter(
        _shape(module.weight, module.activation if isinstance(module, GatedLinear) else None)
        for module in model.modules()
        if isinstance(module, Linear) and not isinstance(module, LMHead)
    )
    head = model.lm_head.rows if isinstance(model.lm_head, LMHead) else None
    shapes[_shape(model.model.embed_tokens.rows if head is None else head, None)] += 1
    return shapes


def _shape(weight: Tensor, activation: Activation | None) -> Shape:
    out_features, in_features = weight.shape
    return Shape(out_features, in_features, activation)


def can_choose(shapes: Counter[Shape], dtype: torch.dtype, *, int8: bool) -> bool:
    """Return whether both our GEMM and oneDNN's serve weights of `shapes`."""
    num_bytes = sum(
        count * shape.out_features * shape.in_features * dtype.itemsize
        for shape, count in shapes.items()
    )
    if num_bytes < _LEAST_BYTES or not (multiplies_int8() if int8 else can_pack(dtype)):
        return False
    return all(
        cpu_gemm.serves(torch.empty(0, shape.in_features, dtype=dtype), torch.device("cpu"))
        and (shape.activation is None or cpu_gemm.can_gate(shape.out_features // 2))
        for shape in shapes
    )


def measure_gemms(shapes: Counter[Shape], dtype: torch.dtype, *, int8: bool) -> GemmChoice:
    """Time our GEMM and oneDNN's on weights of `shapes`, which `can_choose` must allow.

    It takes a second or two. The faster ones are chosen, for all numbers of rows: a weight is
    packed for one of the two.
    """
    ours_s, others_s = dict.fromkeys(_ROWS, 0.0), dict.fromkeys(_ROWS, 0.0)
    with torch.inference_mode():
        for shape, count in shapes.items():
            part = _part(shape, dtype)
            weight = torch.ones(part.out_features, part.in_features, dtype=dtype)
            share = count * shape.out_features / part.out_features
            ours = CpuPackedLinear(weight, None, int8=int8, activation=part.activation)
            other: nn.Module = Int8Linear(weight, None) if int8 else OneDnnLinear(weight, None)
            if part.activation is not None:
                other = Gated(other, part.activation)
            for rows in _ROWS:
                x = torch.ones(rows, part.in_features, dtype=dtype)
                ours_s[rows] += share * _least_seconds(ours, x)
                others_s[rows] += share * _least_seconds(other, x)
    speed = {rows: others_s[rows] / ours_s[rows] for rows in _ROWS}
    mean = math.exp(sum(map(math.log, speed.values())) / len(speed))
    return GemmChoice(mean * _GAIN >= 1, speed)


def _part(shape: Shape, dtype: torch.dtype) -> Shape:
    """Return as much of `shape` as is timed, in steps that `can_gate`."""
    most = max(64, _MOST_BYTES // dtype.itemsize // shape.in_features // 64 * 64)
    return Shape(min(shape.out_features, most), shape.in_features, shape.activation)


def _least_seconds(gemm: Callable[[Tensor], Tensor], x: Tensor) -> float:
    gemm(x)
    least = math.inf
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        gemm(x)
        least = min(least, time.perf_counter() - begin)
    return least
