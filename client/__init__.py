"""Trident's client and launcher: `TridentClient`, `AsyncTridentClient`, `engine.launch.server`."""

from client.aio import AsyncTridentClient
from client.client import TridentClient
from client.connection import SSLOptions
from client.protocol import Chunk, Completion, CompletionOutput, Health, SamplingOptions
from client.retry import RetryPolicy

__all__ = [
    "AsyncTridentClient",
    "Chunk",
    "Completion",
    "CompletionOutput",
    "Health",
    "RetryPolicy",
    "SSLOptions",
    "SamplingOptions",
    "TridentClient",
]
