"""Llama 2 and 3.x."""

from engine.models.causal_lm import CausalLM


class LlamaForCausalLM(CausalLM):
    """The shared decoder, unchanged."""
