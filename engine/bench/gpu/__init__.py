"""One run on a GPU that somebody lends for minutes: tests, replays of ragged steps, then figures.

`run.py` starts a process for each file of tests, and for each group of figures, which may crash,
hang or lose the GPU: a `WorkerProcess`. It measures with `worker.py` the parts of a group, which
are in `engine.py` and `kernels.py`. `report.py` writes what is known so far, after each part.
"""
