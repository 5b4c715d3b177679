"""Talk to a Trident server: `TridentClient` and, for asyncio, `AsyncTridentClient`."""

from client.aio import AsyncTridentClient
from client.client import TridentClient
from client.connection import SSLOptions
from client.errors import (
    AccessDeniedError,
    ConfigurationError,
    ConnectError,
    InvalidRequestError,
    QueueFullError,
    ReadTimeoutError,
    RequestCancelledError,
    RequestTimeoutError,
    ServerError,
    TLSError,
    TridentClientError,
    UnavailableError,
    UnsupportedRequestError,
)
from client.protocol import (
    ChatParameters,
    Chunk,
    Completion,
    CompletionOutput,
    Health,
    Logprob,
    Message,
    Prompt,
    SamplingOptions,
    Section,
    TokenLogprobs,
    Tokens,
)
from client.retry import RetryPolicy
from client.timeouts import Timeout

__all__ = [
    "AccessDeniedError",
    "AsyncTridentClient",
    "ChatParameters",
    "Chunk",
    "Completion",
    "CompletionOutput",
    "ConfigurationError",
    "ConnectError",
    "Health",
    "InvalidRequestError",
    "Logprob",
    "Message",
    "Prompt",
    "QueueFullError",
    "ReadTimeoutError",
    "RequestCancelledError",
    "RequestTimeoutError",
    "RetryPolicy",
    "SSLOptions",
    "SamplingOptions",
    "Section",
    "ServerError",
    "TLSError",
    "Timeout",
    "TokenLogprobs",
    "Tokens",
    "TridentClient",
    "TridentClientError",
    "UnavailableError",
    "UnsupportedRequestError",
]
