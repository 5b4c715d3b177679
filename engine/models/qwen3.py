"""Qwen3, dense."""

from engine.models.causal_lm import CausalLM


class Qwen3ForCausalLM(CausalLM):
    """The shared decoder with a norm on the queries and keys of each head."""

    qk_norm = True
