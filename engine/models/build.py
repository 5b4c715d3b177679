"""Builds a model without weights from its spec."""

from __future__ import annotations

import math

import torch

from engine.errors import UnsupportedError
from engine.layers.rank_group import RankGroup
from engine.layers.scheme import Scheme, Unquantized
from engine.models.causal_lm import CausalLM
from engine.models.sharding import shard
from engine.models.spec import ModelSpec
from engine.quantization.format import QuantizedCheckpoint
from engine.quantization.scheme import Quantized
from engine.quantization.stored import StoredProjection


def build_model(
    spec: ModelSpec,
    *,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    quantization: QuantizedCheckpoint | None = None,
    read_to: torch.device | None = None,
    group: RankGroup | None = None,
) -> CausalLM:
    """Build the model of `spec` on `device`, its parameters allocated and not initialised.

    `engine.weights.initialise_weights` fills them. The rotary tables have `max_model_len` rows.

    Args:
        quantization: of the checkpoint; None: its weights are floats.
        read_to: where projections of floats are allocated, if not on `device`.
        group: the other ranks, if `spec` is one of several.

    Raises:
        CheckpointError: a file of a quantised checkpoint is missing or broken.
        UnsupportedError: a model of this family, or shape, is not read from quantised checkpoints.
    """
    scheme: Scheme = Unquantized(dtype, device, read_to)
    if quantization is not None:
        names = spec.tensor_names
        if names.transposed or names.qkv_heads:
            raise UnsupportedError(
                f"is not supported for {spec.architecture}",
                param="config.json: quantization_config",
            )
        prefix = names.find_prefix(quantization.tensor_names())
        scheme = Quantized(quantization, spec, prefix, dtype, device)
    return CausalLM(spec, scheme, max_model_len=max_model_len, group=group).eval()


def shard_of(
    whole: CausalLM, rank: int, num_ranks: int, *, expert_parallel: bool = False
) -> ModelSpec:
    """Return what a rank computes of `whole`, cut as its checkpoint stores it; as `shard`."""
    # Features of an MLP that a quantised checkpoint stores together.
    units = [
        module.unit
        for name, module in whole.named_modules()
        if isinstance(module, StoredProjection) and name.endswith(".down_proj")
    ]
    unit = math.lcm(*units)
    return shard(whole.spec, rank, num_ranks, feature_unit=unit, expert_parallel=expert_parallel)
