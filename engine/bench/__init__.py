"""Measurements that only the engine itself can make: steps, parts and kernels against floors.

A file beside this one is a command: `python -m engine.bench` tests and measures on a GPU (`gpu/`),
`cpu_step`, `cpu_gemm`, `host_steps` and `grammars` measure on a CPU, `checkpoint` writes what
other machines serve. They share `steps.py`, `floors.py`, `ceilings.py`, `child.py` and `tables.py`,
and the shapes of `engine/bench/kernels`. Loads and servers are measured by `client/bench`.
"""
