"""Resilience of a running server: cancellation, killed processes, malformed requests, long load.

Each module with a `main` is a command: `python -m tests.server.resilience.NAME --help`. The tests
here run a short version of each.
"""
