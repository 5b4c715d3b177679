"""Qwen2 and Qwen2.5, whose biases and windows are in the configuration."""

from engine.models.causal_lm import CausalLM


class Qwen2ForCausalLM(CausalLM):
    """The shared decoder as it stands."""
