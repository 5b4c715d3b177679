"""Compiles ahead of time, for GPUs that are not here, what the wrappers would launch on them."""
