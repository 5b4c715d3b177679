"""Which of several Triton servers answers a request; no I/O but in `pool`."""
