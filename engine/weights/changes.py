"""Which of a checkpoint's tensors an adapter changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from engine.checkpoint.lora.tensors import LowRank
from engine.checkpoint.tensor_files.stored import FLOATS, StoredTensor
from engine.errors import CheckpointError
from engine.models.tensor_names import HEAD, TensorNames


def match_changes(
    changes: Mapping[str, LowRank],
    placed: Sequence[tuple[StoredTensor, Tensor]],
    names: TensorNames,
) -> dict[str, LowRank]:
    """Return an adapter's changes by the checkpoint's names of the tensors.

    Args:
        changes: by the names that the modules had in training.
        placed: the tensors to load, and their destinations.
        names: how the checkpoint names our tensors.

    Raises:
        CheckpointError: the checkpoint has no such tensor of floats, or it has another shape.
    """
    stored = {tensor.name: tensor for tensor, place in placed if place.dtype in FLOATS.values()}
    prefix = names.find_prefix(stored)
    found: dict[str, LowRank] = {}
    for trained, change in changes.items():
        # transformers names parts of models with a vision part otherwise than their files do.
        spellings = [
            prefix + trained.removeprefix(p) for p in names.prefixes if trained.startswith(p)
        ]
        name = next((each for each in (trained, *spellings) if each in stored), None)
        if name is None:
            raise CheckpointError(
                f"{change.a.name}: the base has no {trained} of floats, into which it could be "
                "merged; if the base is quantised, set base_model_name_or_path in "
                "adapter_config.json to one that is not"
            )
        is_head = name == names.of(HEAD, prefix)
        change = replace(change, transposed=names.transposed and not is_head)
        if (shape := stored[name].shape) != change.shape:
            raise CheckpointError(
                f"{change.a.name}: is for a weight of shape {list(change.shape)}, but the base's "
                f"{name} has {list(shape)}"
            )
        found[name] = change
    return found
