"""Loads the weights of a checkpoint into a model, and processes them for its device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from engine.config.setting_types import Quantization
from engine.errors import CheckpointError, UnsupportedError
from engine.execution.cpu_choices import is_own_gemm_faster
from engine.execution.devices import ResolvedConfig
from engine.execution.memory.kv_cache_plan import (
    require_room_for_tables,
    require_room_for_weights,
)
from engine.execution.progress import in_tenths
from engine.layers.experts import Experts
from engine.layers.rank_group import RankGroup
from engine.models.build import build_model, shard_of
from engine.models.causal_lm import CausalLM
from engine.models.process_weights import (
    WeightProcessor,
    check_deterministic,
    check_quantization,
    num_bytes_while_loading,
)
from engine.models.spec import ModelSpec, MoE
from engine.quantization.registry import read_quantization, while_loading
from engine.weights import as_stored, check_weights, initialise_weights


def return_freed_memory() -> None:
    """Give freed memory back to the system, of which glibc keeps what lies between used pieces.

    After weights have been converted piece by piece, that is a tenth of them and more.
    """
    ctypes.CDLL(None).malloc_trim(0)


def _is_own_gemm_faster(
    outline: CausalLM,
    dtype: torch.dtype,
    quantization: Quantization | None,
    on_progress: Callable[[str], None],
    group: RankGroup | None,
) -> bool:
    """Return what `is_own_gemm_faster` returns, of ranks what it returns at the first one."""
    if group is None or group.rank == 0:
        found = is_own_gemm_faster(outline, dtype, quantization, on_progress)
    else:
        found = False
    return found if group is None else bool(group.first(found))


def load_weights(
    config: ResolvedConfig,
    spec: ModelSpec,
    checkpoint: Path,
    *,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Callable[[str], None],
    group: RankGroup | None = None,
) -> CausalLM:
    """Return the model of `checkpoint` on `device`; all that can be refused is, before it is read.

    Args:
        spec: of the whole model.
        group: the ranks of which this is one; None: it is alone.

    Raises:
        CheckpointError, InsufficientMemoryError, UnsupportedError: with what to do about it.
    """
    is_dummy = config.load_format == "dummy"
    quantization = while_loading(config.quantization, None if is_dummy else checkpoint)
    check_quantization(quantization, device, dtype)
    stored = None if is_dummy else read_quantization(checkpoint)
    in_fp8 = quantization == "fp8"
    if in_fp8 and stored is not None:
        raise UnsupportedError(
            f"fp8 needs a checkpoint of floats (this one is {stored.label}); leave it out",
            param="quantization",
        )
    if not is_dummy:
        spec = as_stored(spec, checkpoint)
    build = partial(build_model, max_model_len=max_model_len, dtype=dtype, quantization=stored)
    meta = torch.device("meta")  # shapes alone, nothing is allocated
    try:
        outline = build(spec, device=meta)
    except RuntimeError as error:
        raise CheckpointError(
            f"describes tensors that no memory can hold: {error}", param="config.json"
        ) from None
    if not is_dummy:
        check_weights(outline, checkpoint)
    if config.enable_expert_parallel and not any(isinstance(e.mlp, MoE) for e in spec.layers):
        raise UnsupportedError(
            f"is for mixtures of experts, and {spec.architecture} has none; leave it out",
            param="enable_expert_parallel",
        )
    whole = None
    if group is not None:
        whole = outline
        whole_experts = config.enable_expert_parallel
        spec = shard_of(whole, group.rank, group.size, expert_parallel=whole_experts)
        outline = build(spec, device=meta)
    if in_fp8 and any(isinstance(module, Experts) for module in outline.modules()):
        raise UnsupportedError(
            "fp8 is not supported for a mixture of experts; leave it out", param="quantization"
        )
    if config.deterministic:
        check_deterministic(outline, device)
    num_bytes = num_bytes_while_loading(
        outline, quantization, device, deterministic=config.deterministic
    )
    require_room_for_weights(num_bytes, device, config)
    require_room_for_tables(outline, device, max_model_len)
    on_cpu = device.type == "cpu"
    own_gemm = (
        config.deterministic
        or not on_cpu
        or _is_own_gemm_faster(outline, dtype, quantization, on_progress, group)
    )
    # On a GPU all would be allocated before the first layer is quantised.
    read_to = torch.device("cpu") if in_fp8 else None
    model = build(spec, device=device, read_to=read_to, group=group)
    processor = WeightProcessor(
        model, quantization, deterministic=config.deterministic, own_gemm=own_gemm
    )
    text = "loading weights: {share} % of {mib:,.0f} MiB"
    initialise_weights(
        model,
        checkpoint,
        load_format=config.load_format,
        seed=config.seed,
        whole=whole,
        on_progress=in_tenths(on_progress, text),
        on_layer=processor.process if on_cpu or in_fp8 else None,
    )
    if stored is None:
        processor.finish()
    else:
        processor.finish(stored.head)
    return_freed_memory()
    taken = processor.num_bytes_dequantized
    if stored is not None and taken:
        target = quantization or f"{taken / 2**20:,.0f} MiB of {dtype}"
        on_progress(f"converted weights ({stored.label}) to {target}")
    return model
