"""Trident's engine: continuous batching over a paged KV cache."""
