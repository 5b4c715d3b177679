"""The kernels' part of `python -m engine.bench`: cases, timing, and processes that may crash.

`kernels.bench.runner` measures cases in other processes, `kernels.bench.testing` runs tests in
parallel ones; the engine's part uses both.
"""
