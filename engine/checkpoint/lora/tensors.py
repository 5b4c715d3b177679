"""An adapter's tensors: those that replace the base's, and those that change them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from engine.checkpoint.lora.config import LoraConfig, read_lora_config
from engine.checkpoint.lora.folder import ADAPTER, WEIGHTS
from engine.checkpoint.tensor_files.elements import read_tensor
from engine.checkpoint.tensor_files.stored import StoredTensor, read_file
from engine.errors import CheckpointError, UnsupportedError

_PREFIX = "base_model.model."
# Of embeddings PEFT may write the base's and a second copy of its own too.
_COPY = re.compile(r"\.(original_module|modules_to_save)\.")
_PART = re.compile(r"(.+)\.(?:lora_(A|B)|lora_(magnitude)_vector)(?:\.weight)?")


@dataclass(frozen=True)
class LowRank:
    """The change of a weight W: to `W + scale B A`, and then each of its rows to a given norm.

    Attributes:
        a: [rank, in_features].
        b: [out_features, rank].
        magnitude: [out_features], norms of the rows (DoRA, Liu et al., 2024); None: as they are.
        transposed: whether the base stores W as [in_features, out_features].
    """

    a: StoredTensor
    b: StoredTensor
    magnitude: StoredTensor | None
    scale: float
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight as it is stored."""
        sizes = (self.b.shape[0], self.a.shape[1])
        return sizes[::-1] if self.transposed else sizes

    def merge_into(
        self,
        weight: Tensor,
        base: StoredTensor,
        shape: tuple[int, ...],
        window: tuple[slice, ...],
    ) -> None:
        """Change `weight` in place, in float32.

        Args:
            weight: all elements of `base` in their order, or those of a window.
            shape: of all elements, in the dimensions of `weight`.
            window: the elements of each dimension that `weight` has.

        Raises:
            CheckpointError: a file cannot be read.
        """
        a, b = (read_tensor(each).to(weight.device, torch.float32) for each in (self.a, self.b))
        change = self.scale * (b @ a)
        if self.magnitude is None:
            change = change.t() if self.transposed else change
            weight.copy_(weight.float() + change.reshape(shape)[window])
            return
        # The norm of a row is of all its columns, of which a window may have a part.
        is_whole = weight.numel() == math.prod(shape)
        wide = (weight if is_whole else read_tensor(base).to(weight.device)).reshape(self.shape)
        rows = (wide.t() if self.transposed else wide).float() + change
        norms = read_tensor(self.magnitude).to(weight.device, torch.float32).flatten()
        rows = rows * (norms / rows.norm(dim=1))[:, None]
        wide = rows.t() if self.transposed else rows
        weight.copy_(wide.reshape(shape)[window])


@dataclass(frozen=True)
class Adapter:
    """An adapter, by the names that tensors have in its base.

    Attributes:
        whole: those that it has in place of the base's.
        low_rank: changes of weights.
    """

    whole: dict[str, StoredTensor]
    low_rank: dict[str, LowRank]


def read_adapter(path: Path) -> Adapter | None:
    """Return the adapter of the checkpoint folder `path`, None if it has none.

    Raises:
        UnsupportedError: it changes the model in another way than LoRA and DoRA of linears.
        CheckpointError: a file is missing or broken, or a tensor has a wrong shape or no partner.
    """
    if not (folder := path / ADAPTER).is_dir():
        return None
    config, file = read_lora_config(folder), folder / WEIGHTS
    if not file.is_file():
        raise CheckpointError(
            f"not found in {folder.resolve()}; safetensors is required", param=WEIGHTS
        )
    whole: dict[str, StoredTensor] = {}
    parts: dict[str, dict[str, StoredTensor]] = {}
    for tensor in read_file(file):
        name = tensor.name.removeprefix(_PREFIX)
        if _COPY.search(name):
            continue
        if match := _PART.fullmatch(name):
            parts.setdefault(match[1], {})[match[2] or match[3]] = tensor
        elif "lora_" in name or not name.endswith((".weight", ".bias")):
            raise UnsupportedError(
                f"LoRA tensors of this kind are not supported (in {WEIGHTS})", param=tensor.name
            )
        else:
            name = name.replace(".base_layer.", ".")
            whole[name] = replace(tensor, name=name)
        if not tensor.is_float:
            raise CheckpointError(
                f"must be of floats (got dtype {tensor.type_name} in {WEIGHTS})", param=tensor.name
            )
    return Adapter(
        whole, {f"{name}.weight": _low_rank(name, parts[name], config) for name in parts}
    )


def _low_rank(module: str, parts: dict[str, StoredTensor], config: LoraConfig) -> LowRank:
    for name in "AB":
        if name not in parts:
            raise CheckpointError(f"has no lora_{name} in {WEIGHTS}", param=module)
    a, b, magnitude = parts["A"], parts["B"], parts.get("magnitude")
    is_pair = len(a.shape) == len(b.shape) == 2 and a.shape[0] == b.shape[1] > 0
    if not is_pair:
        raise CheckpointError(
            f"lora_A {list(a.shape)} and lora_B {list(b.shape)} in {WEIGHTS} do not fit together",
            param=module,
        )
    if magnitude is not None and magnitude.num_elements != b.shape[0]:
        raise CheckpointError(
            f"must have shape [{b.shape[0]}] (got {list(magnitude.shape)} in {WEIGHTS})",
            param=magnitude.name,
        )
    return LowRank(a, b, magnitude, config.scale(module, a.shape[0]))
