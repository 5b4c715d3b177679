"""Mistral; its sliding window is in the configuration."""

from engine.models.causal_lm import CausalLM


class MistralForCausalLM(CausalLM):
    """The shared decoder, unchanged."""
