"""Sums over the GPUs of one machine, by kernels that read each other's memory."""
