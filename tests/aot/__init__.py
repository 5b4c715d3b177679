"""Ahead-of-time compilation of all kernel launches, for GPUs that need not be present."""
