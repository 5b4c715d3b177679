"""An adapter's `adapter_config.json`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from engine.fields import Fields, read_json_object

CONFIG = "adapter_config.json"

# Those that this module reads, those that only describe how it was trained, and those that its
# tensors imply. Whatever else is set may change the results.
_KNOWN = frozenset(
    (
        *("peft_type", "base_model_name_or_path", "lora_alpha", "alpha_pattern", "use_rslora"),
        "init_lora_weights",
        *("auto_mapping", "task_type", "inference_mode", "peft_version", "lora_dropout"),
        *("loftq_config", "eva_config", "runtime_config", "qalora_group_size", "megatron_core"),
        *("r", "rank_pattern", "target_modules", "exclude_modules", "modules_to_save", "bias"),
        *("use_dora", "layers_to_transform", "layers_pattern", "ensure_weight_tying"),
        "fan_in_fan_out",  # PEFT goes by the module
    )
)
# Others change the weights of the base before training, which then are not those of its files.
_INITIALISATIONS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class LoraConfig:
    """What is needed to merge an adapter.

    Attributes:
        base: folder or hub id of the model that was trained.
        alphas: patterns of modules and their `lora_alpha`; the first that matches counts.
        alpha: of the others.
        by_root: whether the scale is alpha / sqrt(rank) (rsLoRA, Kalajdzievski, 2023), not / rank.
    """

    base: str
    alphas: tuple[tuple[str, float], ...]
    alpha: float
    by_root: bool

    def scale(self, module: str, rank: int) -> float:
        """Return what the product of both matrices of `module` is multiplied by."""
        found = (alpha for key, alpha in self.alphas if re.match(rf"(.*\.)?({key})$", module))
        return next(found, self.alpha) / (math.sqrt(rank) if self.by_root else rank)


def read_lora_config(folder: Path) -> LoraConfig:
    """Read the configuration of the adapter in `folder`.

    Raises:
        UnsupportedError: it is not of LoRA, or does what is not supported; names the field.
        CheckpointError: it is missing or broken.
    """
    fields = Fields(read_json_object(folder / CONFIG), name=CONFIG)
    if (kind := fields.text("peft_type")) != "LORA":
        raise fields.unsupported("peft_type", f"{kind} is not supported, only LORA")
    for field in fields.names():
        if field not in _KNOWN and fields.raw(field):
            raise fields.unsupported(field, "is not supported")
    if (how := fields.raw("init_lora_weights")) not in _INITIALISATIONS:
        raise fields.unsupported(
            "init_lora_weights",
            f"{how} changes the base model too; save the adapter as a plain LoRA (see PEFT's "
            "path_initial_model_for_weight_conversion)",
        )
    alphas = fields.child("alpha_pattern")
    patterns = [] if alphas is None else [(key, alphas.number(key)) for key in alphas.names()]
    for key, _ in patterns:
        try:
            re.compile(key)
        except re.error as error:
            raise fields.error(
                "alpha_pattern", f"{key!r} is not a valid regular expression: {error}"
            ) from None
    return LoraConfig(
        base=fields.text("base_model_name_or_path"),
        alphas=tuple(patterns),
        alpha=fields.number("lora_alpha"),
        by_root=fields.boolean("use_rslora", default=False),
    )
