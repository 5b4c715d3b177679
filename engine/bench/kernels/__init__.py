"""The cases of `python -m engine.bench`: each kernel at the shapes of real models, beside torch's.

A file has the cases of one kernel, or of a few alike, as data; `cases.py` lists them all. A case
builds its tensors and the calls to be timed (`case.py`). `engine.bench.gpu` times them in a process
that may crash, and holds them against floors and aims.
"""
