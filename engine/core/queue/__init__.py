"""Waiting queues: their order and limits, admission and chunk sizes."""
