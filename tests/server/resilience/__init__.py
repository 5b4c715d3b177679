"""Shows that a running server stays up: cancellations, kills, malformed requests, long load.

Each module with a `main` is a command: `python -m tests.server.resilience.NAME --help`. The tests
beside them run each in a short form.
"""
