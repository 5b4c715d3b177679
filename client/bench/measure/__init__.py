"""Measurements: a workload run on a server, and what the machine and the server say meanwhile."""
