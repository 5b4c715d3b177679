"""Tests and measures every kernel on a GPU, beside the best that torch offers.

    python -m kernels.bench --json results.json

needs Python, torch, Triton, NumPy and pytest, nothing else, and five minutes of one GPU.
"""
