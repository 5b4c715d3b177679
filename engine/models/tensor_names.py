"""TensorNames: how a family's checkpoints name and store the tensors of our modules."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

_ONE_OF_EXPERTS = re.compile(r"\.experts\.\d+\.")

# What a tensor of the experts is of.
ExpertTensors = Literal["each", "projection", "gates and ups"]


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names of a checkpoint's tensors. The defaults are those of Llama.

    Attributes:
        renamed: names of our modules, or parts of their paths, and the checkpoint's; where several
            match, the first counts.
        prefixes: accepted prefixes in place of our `model.`; the first that matches counts.
        stacked: our linears that the checkpoint stores as we do: their projections in one tensor.
        qkv_heads: heads whose queries, keys and values such a `qkv_proj` has side by side; 0: it
            has all queries first, then all keys.
        experts: whether each expert has its own projections, or one tensor has a projection of all
            of them, or one has all gates and ups, and one all downs, inputs first. None: as each,
            or as gates and ups; `with_experts_of` finds out.
        outputs_first: where gates and ups are together: outputs first; None: by the shape of each
            tensor.
        gates_first: likewise: the gates of one before its ups, which alternate otherwise.
        transposed: whether linears but the head are stored [in_features, out_features].
        ignored: patterns of tensors that are not loaded: what follows from the configuration, or
            belongs to a part of the model that is not served.
    """

    renamed: tuple[tuple[str, str], ...] = (
        ("attention_norm", "input_layernorm"),
        ("mlp_norm", "post_attention_layernorm"),
    )
    prefixes: tuple[str, ...] = ("model.",)
    stacked: tuple[str, ...] = ()
    qkv_heads: int = 0
    experts: ExpertTensors | None = "each"
    outputs_first: bool | None = False
    gates_first: bool = False
    transposed: bool = False
    ignored: tuple[str, ...] = ("*.rotary_emb.*",)

    def find_prefix(self, stored: Collection[str]) -> str:
        """Return which of the prefixes a checkpoint with the tensors `stored` uses.

        It is "" for a decoder that is stored alone.
        """
        candidates = (p for p in (*self.prefixes, "") if self.of(EMBEDDING, p) in stored)
        return next(candidates, self.prefixes[0])

    def of(self, name: str, prefix: str) -> str:
        """Return the checkpoint's name of our tensor `name`; `prefix` is one of `prefixes`."""
        pattern = "|".join(re.escape(ours) for ours, _ in self.renamed)
        theirs = dict(self.renamed)
        name = re.sub(rf"(?<![^.])(?:{pattern})(?![^.])", lambda found: theirs[found[0]], name)
        if name.startswith("model."):
            return prefix + name.removeprefix("model.")
        # A part that is a model of its own has its head beside its decoder.
        return prefix.removesuffix("model.") + name if prefix.endswith(".model.") else name

    def with_experts_of(self, stored: Collection[str]) -> TensorNames:
        """Return the names with `experts` as a checkpoint with the tensors `stored` has them."""
        if self.experts is not None:
            return self
        of_one = (_ONE_OF_EXPERTS.search(name) and not self.is_ignored(name) for name in stored)
        return replace(self, experts="each" if any(of_one) else "gates and ups")

    def beside_vision(self) -> TensorNames:
        """Return the names of the text part in a checkpoint that has a vision part."""
        return replace(
            self,
            prefixes=("language_model.model.", "model.language_model."),
            ignored=(*self.ignored, "*vision_tower.*", "*multi_modal_projector.*"),
        )

    def is_ignored(self, name: str) -> bool:
        """Return whether the checkpoint's tensor `name` is not loaded."""
        return any(fnmatchcase(name, pattern) for pattern in self.ignored)


LLAMA_NAMES = TensorNames()
