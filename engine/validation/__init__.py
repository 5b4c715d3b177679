"""Checks of what clients and settings say: limits, what is not supported, and how it is told."""
