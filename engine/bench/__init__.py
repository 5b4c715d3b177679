"""Measurements that only the engine itself can make: steps, parts and kernels against floors.

A file beside this one is a command: `python -m engine.bench` tests and measures on a GPU (`gpu/`),
`cpu_step`, `cpu_products`, `host_steps` and `grammars` measure on a CPU, `shared_blocks` and
`window_blocks` count KV memory, `checkpoint` and `pack` prepare other machines. They share
`floors.py`, `ceilings.py`, `clock.py` and `tables.py`, and the shapes of `kernels/bench`.
Loads and whole servers are measured by `client/bench`.
"""
