"""Trident's client and launcher: `TridentClient`, `AsyncTridentClient`, `client.serve`."""

from client.aio import AsyncTridentClient
from client.client import TridentClient
from client.protocol import Chunk, Completion, CompletionOutput, SamplingOptions

__all__ = [
    "AsyncTridentClient",
    "Chunk",
    "Completion",
    "CompletionOutput",
    "SamplingOptions",
    "TridentClient",
]
