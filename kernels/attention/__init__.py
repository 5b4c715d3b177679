"""Attention over a paged KV cache: prefill, decode, and what plans and merges its splits."""
