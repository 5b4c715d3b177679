"""Observability of a gateway: its metrics and its servers', and a log line for each request."""
