"""One run on a GPU that somebody lends for minutes: tests, replays of ragged steps, then figures.

`run.py` has its stages in order. A stage is done by other processes, which may crash, hang or lose
the GPU: `supervisor.py` starts, watches, ends and replaces them; `pytest_worker.py` runs tests and
`worker.py` measures the parts of a group. `plan.py` lists the groups; their parts are in
`engine.py`, `transformers_peer.py`, `kernels.py` and `replays/`. `report.py` writes what is known
so far, after each part.
"""
