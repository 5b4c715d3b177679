"""Qwen2 and Qwen2.5; biases and sliding windows are in the configuration."""

from engine.models.causal_lm import CausalLM


class Qwen2ForCausalLM(CausalLM):
    """The shared decoder, unchanged."""
