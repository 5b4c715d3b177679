"""Entry points: initialise a model's weights from a checkpoint or at random."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from engine.checkpoint.lora.tensors import LowRank, read_adapter
from engine.checkpoint.tensor_files.headers import read_headers
from engine.checkpoint.tensor_files.stored import StoredTensor
from engine.config.setting_types import LoadFormat
from engine.errors import CheckpointError
from engine.models.causal_lm import CausalLM
from engine.weights.changes import match_changes
from engine.weights.dummy import fill_with_random_weights
from engine.weights.kv_scales import is_kv_scale, load_kv_scales
from engine.weights.matching import destinations, match_tensors
from engine.weights.reading import read_spans, split_into_spans
from engine.weights.staging import CudaCopier

log = logging.getLogger("trident.engine")

_SPAN_BYTES = 2**24


def initialise_weights(
    model: CausalLM,
    checkpoint: Path,
    *,
    load_format: LoadFormat,
    seed: int,
    on_progress: Callable[[int, int], None] | None = None,
    on_layer: Callable[[nn.Module], None] | None = None,
) -> None:
    """Fill the parameters of `model` on their device.

    Args:
        checkpoint: folder of the weights; ignored for dummy weights.
        load_format: `auto`: `load_weights`; `dummy`: `fill_with_random_weights`.
        seed: of dummy weights.
        on_progress: called in this thread with (bytes done, total bytes), finally with both equal.
        on_layer: called in this thread with each decoder layer as soon as it is filled, before the
            next one is, and may replace what is in it. For a CPU, where what is not filled takes no
            memory yet.

    Raises:
        CheckpointError: as `load_weights`.
    """
    if load_format == "dummy":
        fill_with_random_weights(model, seed, on_progress=on_progress, on_layer=on_layer)
    else:
        load_weights(model, checkpoint, on_progress=on_progress, on_layer=on_layer)


def load_weights(
    model: CausalLM,
    path: Path,
    *,
    on_progress: Callable[[int, int], None] | None = None,
    on_layer: Callable[[nn.Module], None] | None = None,
) -> None:
    """Fill the parameters of `model` from the checkpoint folder `path`, cast to their dtype.

    Scales of an fp8 KV cache, if the checkpoint has them, are stored in the attention layers. What
    an adapter changes is merged into the parameters, before anything is made of them.

    `on_progress` is called in this thread with (bytes read, total bytes), finally with both equal;
    `on_layer` is as in `initialise_weights`. All reader threads have ended on return, also after an
    error.

    Raises:
        CheckpointError: a file is missing or corrupt, or a tensor is missing, unknown or of a
            wrong shape; the model is then unchanged, unless a file breaks while it is read.
    """
    placed, kv_scales, changes = _match(model, path)
    if changes:
        log.info("merging an adapter into %d weights", len(changes))
    load_kv_scales(model, kv_scales, model.spec.tensor_names)
    total = sum(tensor.num_bytes for tensor, _ in placed)
    loaded = 0

    def advance(num_bytes: int) -> None:
        nonlocal loaded
        loaded += num_bytes
        if on_progress is not None:
            on_progress(loaded, total)

    device = model.model.embed_tokens.weight.device
    copier = CudaCopier(device) if device.type == "cuda" else None
    parts = _by_layer(model, placed) if on_layer is not None else [(None, placed)]
    del placed  # a part's destinations live no longer than it takes to fill them
    while parts:
        layer, part = parts.pop(0)
        files = sorted({tensor.file.name for tensor, _ in part})
        changed = [(changes[tensor.name], at) for tensor, at in part if tensor.name in changes]
        # What is quantised on a GPU is read on the host.
        on_host = [(tensor, place) for tensor, place in part if place.device.type == "cpu"]
        elsewhere = [(tensor, place) for tensor, place in part if place.device.type != "cpu"]
        del part
        for places, its_copier in ((on_host, None), (elsewhere, copier)):
            spans = list(split_into_spans(places, _SPAN_BYTES))
            places.clear()
            if spans:
                num_threads = _num_threads(device)
                read_spans(spans, its_copier, num_threads=num_threads, on_read=advance)
            del spans
        for change, at in changed:
            change.merge_into(at)
        del changed
        if layer is not None and on_layer is not None:
            try:
                on_layer(layer)
            except CheckpointError as error:  # a value that only the conversion reads
                raise CheckpointError(f"{', '.join(files)}: {error}") from None


def _by_layer(
    model: CausalLM, placed: list[tuple[StoredTensor, Tensor]]
) -> list[tuple[nn.Module | None, list[tuple[StoredTensor, Tensor]]]]:
    """Return the tensors of each decoder layer in turn, then all others, with their destinations.

    A destination is a part of a parameter: they have the same memory.
    """
    owners = {
        parameter.untyped_storage().data_ptr(): i
        for i, layer in enumerate(model.model.layers)
        for parameter in layer.parameters()
    }
    others = len(model.model.layers)
    parts: list[list[tuple[StoredTensor, Tensor]]] = [[] for _ in range(others + 1)]
    for tensor, place in placed:
        parts[owners.get(place.untyped_storage().data_ptr(), others)].append((tensor, place))
    return list(zip([*model.model.layers, None], parts, strict=True))


def check_weights(model: CausalLM, path: Path) -> None:
    """Raise `CheckpointError` if the headers of the checkpoint folder `path` do not fit `model`.

    Its parameters may be on the meta device.
    """
    _match(model, path)


def _match(
    model: CausalLM, path: Path
) -> tuple[list[tuple[StoredTensor, Tensor]], list[StoredTensor], dict[str, LowRank]]:
    """Return the tensors to load with their destinations, and the scales of a KV cache.

    And what an adapter changes of the tensors, by the name of each.
    """
    stored = read_headers(path)
    names = model.spec.tensor_names
    kv_scales = [
        stored.pop(name) for name in [*stored] if is_kv_scale(name) and not names.is_ignored(name)
    ]
    tied = model.lm_head is None
    placed = match_tensors(stored, destinations(model, names), names, tied=tied)
    adapter = read_adapter(path)
    changes = {} if adapter is None else match_changes(adapter.low_rank, placed, names)
    return placed, kv_scales, changes


def _num_threads(device: torch.device) -> int:
    """Return the number of reader threads, which mostly wait for the disk or copy page cache.

    A GPU can take more than one core copies; a few threads saturate host memory.
    """
    return min(2 * len(os.sched_getaffinity(0)), 8 if device.type == "cuda" else 4)
