"""StarCoder 2: Llama with layer norms, biases and a plain MLP, and with windows in some sizes."""

from __future__ import annotations

from engine.fields import Fields
from engine.models import parsing
from engine.models.rope import parse_rope
from engine.models.spec import LayerSpec, ModelSpec, Plain
from engine.models.tensor_names import LLAMA_NAMES, TensorNames

_NAMES = TensorNames(
    renamed=(
        *LLAMA_NAMES.renamed,
        ("mlp.up_proj", "mlp.c_fc"),
        ("mlp.down_proj", "mlp.c_proj"),
    )
)


def parse(fields: Fields, architecture: str) -> ModelSpec:
    """Make the spec of a model of the fields of its `config.json`."""
    rope, norm = parse_rope(fields), parsing.layer_norm(fields, "norm_epsilon")
    bias = fields.boolean("use_bias", default=True)
    attention = parsing.attention(
        parsing.heads(fields, num_kv_heads=2),
        rope,
        window=parsing.window(fields, absent=None),
        qkv_bias=bias,
        output_bias=bias,
    )
    activation = parsing.plain_activation(fields, "hidden_act", absent="gelu_pytorch_tanh")
    mlp = Plain(fields.integer("intermediate_size"), activation, bias)
    return parsing.model_spec(
        fields,
        architecture,
        [LayerSpec(attention, mlp, norm)] * parsing.num_layers(fields),
        norm,
        tensor_names=_NAMES,
        tie_word_embeddings=True,
    )
