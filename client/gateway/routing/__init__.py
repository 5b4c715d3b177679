"""Routing of requests to one of several Triton servers; no I/O but in `pool`."""
