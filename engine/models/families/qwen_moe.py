"""Qwen 2 and 3 with mixtures of experts; 2 has an expert that every token goes through as well."""

from __future__ import annotations

from engine.fields import Fields
from engine.models import parsing
from engine.models.rope import parse_rope
from engine.models.spec import Gated, LayerSpec, ModelSpec, MoE
from engine.models.tensor_names import LLAMA_NAMES, TensorNames

_NAMES = TensorNames(renamed=(*LLAMA_NAMES.renamed, ("mlp.router", "mlp.gate")))


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    is_qwen2 = architecture == "Qwen2MoeForCausalLM"
    # In transformers its layers are not those of Qwen 2 and 3; no published model has windows.
    parsing.refuse(fields, use_sliding_window=False)
    fields = fields.over(parsing.NO_WINDOWS)
    rope, norm = parse_rope(fields), parsing.rms_norm(fields)
    heads = parsing.heads(fields, num_kv_heads=None if is_qwen2 else 4)
    bias = fields.boolean("attention_bias", default=False)
    activation = parsing.gated_activation(fields)
    count = "num_experts" if "num_experts" in fields else "num_local_experts"
    moe = MoE(
        *parsing.experts(fields, count),
        fields.integer("moe_intermediate_size"),
        activation,
        normalizes=fields.boolean("norm_topk_prob", default=False),
        shared_size=fields.integer("shared_expert_intermediate_size") if is_qwen2 else 0,
    )
    dense = Gated(fields.integer("intermediate_size"), activation)
    layers = [
        LayerSpec(
            parsing.attention(
                heads,
                rope,
                qkv_bias=fields.boolean("qkv_bias", default=True) if is_qwen2 else bias,
                output_bias=not is_qwen2 and bias,
                qk_norm=None if is_qwen2 else norm,
            ),
            moe if is_sparse else dense,
            norm,
        )
        for is_sparse in sparse_layers(fields)
    ]
    return parsing.model_spec(
        fields,
        architecture,
        layers,
        norm,
        tensor_names=_NAMES,
    )


def sparse_layers(fields: Fields) -> list[bool]:
    """Return which layers are mixtures."""
    every, dense = fields.integer("decoder_sparse_step", default=1), fields.raw("mlp_only_layers")
    dense = fields.integers("mlp_only_layers") if dense else ()
    return [i not in dense and (i + 1) % every == 0 for i in range(parsing.num_layers(fields))]
