"""TenantClient: a client of the servers that acts for one tenant only."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Unpack
from uuid import uuid4

from client.gateway.routing.pool import ServerPool
from client.gateway.security.quotas import Quotas
from client.gateway.security.tenants import Tenant
from client.protocol import Chunk, Prompt, RequestOptions, TokenizeOptions, Tokens


class TenantClient:
    """Answers of a `ServerPool` to requests that carry a tenant's name, salt and ids.

    So no tenant finds out what others have asked by how soon an answer comes, none can end
    another's request, and all share the engine equally. They count against the tenant's limits.
    """

    def __init__(
        self, pool: ServerPool, tenant: Tenant, quotas: Quotas, tenant_key: str | None = None
    ) -> None:
        """Ask `pool` for `tenant`; `tenant_key` is the servers' setting."""
        self._pool = pool
        self._tenant = tenant
        self._tenant_key = tenant_key
        self._quotas = quotas

    async def stream(
        self, prompt: Prompt | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncGenerator[Chunk, None]:
        """Yield the answer piece by piece; as `ServerPool.stream`."""
        options["cache_salt"] = self._tenant.cache_salt(options.get("cache_salt", ""))
        options["tenant"] = self._tenant.name
        if self._tenant_key is not None:
            options["tenant_key"] = self._tenant_key
        options["request_id"] = self._tenant.request_id(options.get("request_id") or uuid4().hex)
        answers = self._pool.stream(prompt, **options)
        num_input_tokens = 0
        async with aclosing(answers) as chunks:
            async for chunk in chunks:
                new_input = max(chunk.num_input_tokens - num_input_tokens, 0)
                num_input_tokens += new_input
                self._quotas.charge(self._tenant, new_input + chunk.num_output_tokens)
                yield chunk

    async def tokenize(self, text: str | None = None, **options: Unpack[TokenizeOptions]) -> Tokens:
        """Return the tokens of a text or of messages; as `ServerPool.tokenize`."""
        options["tenant"] = self._tenant.name
        if self._tenant_key is not None:
            options["tenant_key"] = self._tenant_key
        return await self._pool.tokenize(text, **options)
