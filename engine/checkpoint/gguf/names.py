"""How GGUF files name and store the tensors of our modules."""

from __future__ import annotations

from dataclasses import replace

from engine.models.spec import AttentionSpec, LayerSpec, ModelSpec, NormSpec
from engine.models.tensor_names import TensorNames

# The link to the file, in the folder that stands for it.
GGUF = "model.gguf"

_RENAMED = (
    ("layers", "blk"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.router", "ffn_gate_inp"),
    ("mlp.experts.gate_proj", "ffn_gate_exps"),
    ("mlp.experts.up_proj", "ffn_up_exps"),
    ("mlp.experts.down_proj", "ffn_down_exps"),
    ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("attention_norm", "attn_norm"),
    ("attention_output_norm", "post_attention_norm"),
    ("mlp_norm", "ffn_norm"),
    ("mlp_output_norm", "post_ffw_norm"),
    ("embed_tokens", "token_embd"),
    ("norm", "output_norm"),
    ("lm_head", "output"),
)
# What an architecture has in place of those, or beside them.
_OWN = {
    "GptOssForCausalLM": {
        "self_attn.sinks": "attn_sinks.weight",
        "mlp_norm": "post_attention_norm",
    },
}
# Factors of the rotary frequencies, which the configuration has.
_IGNORED = ("rope_freqs.weight", "rope_factors_*.weight")


def spec_of_gguf(spec: ModelSpec) -> ModelSpec:
    """Return the spec of a model whose weights are read from GGUF.

    Norms with a unit offset are stored with it.
    """
    names = TensorNames(
        renamed=tuple((dict(_RENAMED) | _OWN.get(spec.architecture, {})).items()),
        prefixes=("",),
        stacked=spec.tensor_names.stacked,
        experts="projection",
        ignored=_IGNORED,
    )
    layers = tuple(_layer(layer) for layer in spec.layers)
    return replace(spec, layers=layers, norm=_norm(spec.norm), tensor_names=names)


def _layer(layer: LayerSpec) -> LayerSpec:
    mixer = layer.mixer
    if isinstance(mixer, AttentionSpec) and mixer.qk_norm is not None:
        mixer = replace(mixer, qk_norm=_norm(mixer.qk_norm))
    return replace(layer, mixer=mixer, norm=_norm(layer.norm))


def _norm(norm: NormSpec) -> NormSpec:
    return replace(norm, unit_offset=False)
