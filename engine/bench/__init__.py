"""Tests the engine on a GPU, then measures it against the GPU's limits and transformers.

    python -m engine.bench --json results.json

The packages it needs are in `engine.bench.requirements`; it downloads nothing.
"""
