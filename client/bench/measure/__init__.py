"""Measurements: a workload run on a server, and the metrics of machine and server meanwhile."""
