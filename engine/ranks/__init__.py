"""Ranks: processes that compute one model together, each a part of every layer.

The engine process is rank 0, which schedules, draws and answers; the others, its children, run the
steps that it sends. See `engine/ranks/README.md`.
"""
