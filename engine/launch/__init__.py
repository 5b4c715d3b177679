"""Finds tritonserver on this machine and starts it on Trident's model repository."""
