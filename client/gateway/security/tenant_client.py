"""TenantClient: the servers as one tenant may use them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Unpack
from uuid import uuid4

from client.gateway.routing.pool import ServerPool
from client.gateway.security.quotas import Quotas
from client.gateway.security.tenants import Tenant
from client.protocol import ChatParameters, Chunk, Health, Message, Prompt, SamplingOptions, Tokens
from client.timeouts import Timeout


class TenantClient:
    """A `ServerPool` whose requests carry a tenant's salt and ids, and count against its limits.

    So no tenant finds out what others have asked by how soon an answer comes, and none can end
    another's request.
    """

    def __init__(self, pool: ServerPool, tenant: Tenant, quotas: Quotas) -> None:
        self._pool = pool
        self._tenant = tenant
        self._quotas = quotas

    async def stream(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        chat_parameters: ChatParameters | None = None,
        timeout: float | Timeout | None = None,
        priority: int = 0,
        request_id: str = "",
        **sampling: Unpack[SamplingOptions],
    ) -> AsyncGenerator[Chunk, None]:
        """Yield the answer piece by piece; as `ServerPool.stream`."""
        sampling["cache_salt"] = self._tenant.cache_salt(sampling.get("cache_salt", ""))
        answers = self._pool.stream(
            prompt,
            messages=messages,
            chat_parameters=chat_parameters,
            timeout=timeout,
            priority=priority,
            request_id=self._tenant.request_id(request_id or uuid4().hex),
            **sampling,
        )
        num_input_tokens = 0
        async with aclosing(answers) as chunks:
            async for chunk in chunks:
                new_input = max(chunk.num_input_tokens - num_input_tokens, 0)
                num_input_tokens += new_input
                self._quotas.charge(self._tenant, new_input + chunk.num_output_tokens)
                yield chunk

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        chat_parameters: ChatParameters | None = None,
        add_special_tokens: bool | None = None,
    ) -> Tokens:
        """Return the tokens of a text or of messages; as `ServerPool.tokenize`."""
        return await self._pool.tokenize(
            text,
            messages=messages,
            chat_parameters=chat_parameters,
            add_special_tokens=add_special_tokens,
        )

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens; as `ServerPool.detokenize`."""
        return await self._pool.detokenize(token_ids)

    async def health(self, timeout: float | None = 5.0) -> Health:
        """Return the state of the servers; as `ServerPool.health`."""
        return await self._pool.health(timeout)
