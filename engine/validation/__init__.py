"""Validation of requests and settings, and its error messages."""
