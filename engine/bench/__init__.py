"""Tests engine and kernels on a GPU, then measures them against its limits and transformers.

    python -m engine.bench --out gpu-results

needs Python, torch, Triton, NumPy and the wheels of `engine.bench.pack`, and nine minutes of one
GPU. `engine.bench.run` has its parts in order.
"""
