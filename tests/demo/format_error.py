"""What each format of quantised checkpoints costs in accuracy on a CPU, and what our products add.

Run as ``python -m tests.demo.format_error [--checkpoint DIR] [--batches N]``, with a checkpoint of
Llama's names and floating point; ``engine.demo.random_checkpoint`` creates some of other shapes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor
from transformers import AutoTokenizer

from engine.config.setting_types import Quantization
from engine.demo import CHECKPOINT_DIR
from engine.layers.integer_weight import quantize_groups
from engine.layers.linear.int8 import quantize_channels
from engine.layers.linear.linear import FloatLinear, Linear
from engine.layers.vocabulary import LMHead
from engine.models.build import build_model
from engine.models.causal_lm import CausalLM
from engine.models.process_weights import WeightProcessor, check_deterministic
from engine.quantization.format import Format, QuantizedCheckpoint
from engine.quantization.linear import QuantizedLinear
from tests.demo.batches import batches
from tests.demo.encoders import ENCODERS, Encoded, Encoder
from tests.demo.logit_error import CPU, LogitError, load_on_cpu, logit_errors

_SEED = 2  # differs from the training text's seed
_GROUP = 32  # of int4 while loading

_COLUMNS = (
    *("", "products of", "added: logits", "perplexity", "same token"),
    *("in all: logits", "perplexity", "same token"),
)

Text = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class FormatError:
    """What a format costs.

    Attributes:
        product: what the weights are when they are multiplied.
        added: error against the weights that the checkpoint stands for, in float32.
        whole: error against the weights before they were quantised, in float32.
    """

    product: str
    added: LogitError
    whole: LogitError


@dataclass(frozen=True, slots=True)
class _Checkpoint(QuantizedCheckpoint):
    """What a checkpoint with the weights in `encoded`, by their modules, says of itself."""

    encoded: Mapping[str, Encoded]
    label: str = ""

    def tensor_names(self) -> Collection[str]:
        return self.encoded

    def format_of(self, module: str, *, is_expert: bool) -> Format | None:
        return self.encoded[module].format if module in self.encoded else None


def format_error(checkpoint: Path, encode: Encoder, text: Text) -> FormatError:
    """Compare a model with the weights of `checkpoint` in a format, as it is served in bfloat16."""
    original, reference = (load_on_cpu(checkpoint, torch.float32) for _ in range(2))
    encoded = {module: encode(weight.contiguous()) for module, weight in _projections(reference)}
    for module, weight in _projections(reference):
        weight.copy_(encoded[module].decoded())
    plain = load_on_cpu(checkpoint, torch.bfloat16)
    model = build_model(
        plain.spec,
        max_model_len=plain.spec.context_length,
        dtype=torch.bfloat16,
        device=CPU,
        quantization=_Checkpoint(encoded),
    )
    _fill(model, plain, encoded)
    processor = _convert(model, None)
    product = "floats" if processor.num_bytes_dequantized else "integers"
    return FormatError(product, *logit_errors(model, (reference, original), text))


def loading_error(checkpoint: Path, quantization: Quantization | None, text: Text) -> FormatError:
    """Compare a model that is quantised while it is loaded, or left in bfloat16."""
    original, reference = (load_on_cpu(checkpoint, torch.float32) for _ in range(2))
    if quantization is not None:
        for module in reference.modules():
            if isinstance(module, Linear) and not isinstance(module, (FloatLinear, LMHead)):
                module.weight.copy_(_rounded(module.weight, quantization))
        # A tied head is a copy of its own.
        rows = (reference.lm_head or reference.model.embed_tokens).rows
        assert isinstance(rows, Tensor)
        head = LMHead(*rows.shape, dtype=torch.float32, device=CPU)
        head.rows.copy_(_rounded(rows, "int8"))
        reference.lm_head = head
    model = load_on_cpu(checkpoint, torch.bfloat16)
    _convert(model, quantization)
    product = "floats" if quantization is None else "integers"
    return FormatError(product, *logit_errors(model, (reference, original), text))


def _convert(model: CausalLM, quantization: Quantization | None) -> WeightProcessor:
    """Convert `model` to products of few tokens; some of many are more exact.

    Raises:
        UnsupportedError: the CPU kernels are not there.
    """
    check_deterministic(model, CPU)
    processor = WeightProcessor(model, quantization, deterministic=True)
    processor.finish()
    return processor


def _rounded(weight: Tensor, quantization: Quantization) -> Tensor:
    """Return what the integers of `weight` stand for."""
    if quantization == "int8" or weight.shape[1] % _GROUP:
        steps, scale = quantize_channels(weight)
        return steps * scale[:, None]
    return quantize_groups(weight, _GROUP).dequantized()


def _projections(model: CausalLM) -> Iterator[tuple[str, Tensor]]:
    """Yield the projections of the layers by their names in the checkpoint, with their weights."""
    for path, module in model.named_modules():
        if isinstance(module, Linear) and not isinstance(module, (FloatLinear, LMHead)):
            parent = path.rpartition(".")[0]
            weights = torch.split(module.weight, list(module.parts.values()))
            for part, weight in zip(module.parts, weights, strict=True):
                yield f"{parent}.{part}", weight


def _fill(model: CausalLM, plain: CausalLM, encoded: Mapping[str, Encoded]) -> None:
    """Fill a quantised model with encoded weights, and all else from the plain one."""
    for path, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            parent = path.rpartition(".")[0]
            for name, tensor in module.destinations().items():
                part, _, key = name.partition(".")
                if key != "bias":
                    tensor.copy_(encoded[f"{parent}.{part}"].tensors[key])
    stored = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        if name in stored:
            stored[name].copy_(parameter)


def show(errors: Mapping[str, FormatError]) -> None:
    """Print the results as a table of Markdown."""
    for row in (_COLUMNS, ["---"] * len(_COLUMNS)):
        print(_row(row))
    for name, error in errors.items():
        cells = [
            f"{each.relative_error:.2%} | x {each.perplexity_ratio:.4f} | {each.agreement:.1%}"
            for each in (error.added, error.whole)
        ]
        print(_row([name, error.product, *cells]))


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(
    checkpoint: Annotated[Path, typer.Option(help="Folder of the checkpoint.")] = CHECKPOINT_DIR,
    num_batches: Annotated[
        int, typer.Option("--batches", min=1, help="Of 4,096 tokens of text each.")
    ] = 4,
) -> None:
    """Print how a checkpoint's logits change in each format."""
    text = list(islice(batches(AutoTokenizer.from_pretrained(checkpoint), _SEED), num_batches))
    errors = {"none, bfloat16": loading_error(checkpoint, None, text)}
    for quantization in ("int8", "int4"):
        name = f"`--quantization {quantization}`"
        errors[name] = loading_error(checkpoint, quantization, text)
    for name, named in ENCODERS.items():
        errors[name] = format_error(checkpoint, named.encode, text)
    show(errors)


if __name__ == "__main__":
    typer.run(main)
