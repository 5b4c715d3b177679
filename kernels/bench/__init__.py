"""Tests and measures every kernel on a GPU, next to the fastest torch implementations.

    python -m kernels.bench --json results.json

needs Python, torch, Triton, NumPy and pytest, nothing else, and five minutes of one GPU.
"""
