"""Tenants and their API keys, which identify who sends a request."""

from __future__ import annotations

import hashlib
import hmac
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import Base64Bytes, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from client.errors import ConfigurationError

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
PerMinute = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, slots=True)
class Tenant:
    """A user or group with API keys of their own. Immutable.

    Attributes:
        name: for operators.
        digests: SHA-256 of the keys.
        requests_per_minute, tokens_per_minute: limits of what is taken; None: no limit.
    """

    name: str
    digests: tuple[Base64Bytes, ...]  # so where the settings are JSON
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    def cache_salt(self, own: str) -> str:
        """Return the salt of the prefixes that a request shares; nobody else's is the same.

        It follows from the tenant's first key, so it is the same in every gateway.

        Args:
            own: the salt that the request names, or "".
        """
        secret = b"cache_salt:" + self.digests[0]
        return hmac.new(secret, own.encode(errors="replace"), "sha256").hexdigest()

    def request_id(self, own: str) -> str:
        """Return the id of a request of this tenant, which no other's request can have.

        Args:
            own: its id among the tenant's.
        """
        return f"{self.digests[0].hex()[:16]}-{own}"


@dataclass(frozen=True)
class Tenants:
    """All who may ask. Immutable.

    Raises:
        ConfigurationError: two have the same key.
    """

    all: tuple[Tenant, ...]

    def __post_init__(self) -> None:
        for tenant in self.all:
            for digest in tenant.digests:
                if (other := self._by_digest[digest]) is not tenant:
                    raise ConfigurationError(
                        f"{other.name} and {tenant.name} have the same key; give each its own",
                        param="api_key",
                    )

    @cached_property
    def _by_digest(self) -> dict[bytes, Tenant]:
        return {digest: tenant for tenant in self.all for digest in tenant.digests}

    def with_key(self, key: bytes) -> Tenant | None:
        """Return whose key that is.

        How long it takes reveals nothing of the keys: what is compared is a hash, which nobody can
        choose digit by digit.
        """
        return self._by_digest.get(hashlib.sha256(key).digest())


def read_tenants(keys: Iterable[str], file: Path | None) -> Tenants | None:
    """Return those who have one of `keys`, each of them alone, and those of a file.

    Without any key and file it is None: everybody may ask.

    Raises:
        ConfigurationError: a key is empty, or the file cannot be read or is wrong.
    """
    found = [_keyholder(key) for key in keys]
    if file is not None:
        found += _read(file)
    elif not found:
        return None
    return Tenants(tuple(found))


def _keyholder(key: str) -> Tenant:
    if not key.strip():
        raise ConfigurationError("must not be empty", param="api_key")
    digest = hashlib.sha256(key.encode()).digest()
    return Tenant(f"key-{digest.hex()[:8]}", (digest,))


class _Entry(BaseModel):
    """A table of the file."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    sha256: Annotated[list[Digest], Field(min_length=1)]
    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None


_FILE = TypeAdapter(dict[str, _Entry], config=ConfigDict(hide_input_in_errors=True))


def _read(file: Path) -> list[Tenant]:
    try:
        entries = _FILE.validate_python(tomllib.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigurationError(f"{file}: {error.strerror}", param="api_key_file") from None
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        raise ConfigurationError(f"{file}: {path}: {first['msg']}", param="api_key_file") from None
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, or nested too deeply
        raise ConfigurationError(f"{file}: {error}", param="api_key_file") from None
    if not entries:
        raise ConfigurationError(f"{file}: has no keys", param="api_key_file")
    return [
        Tenant(
            name,
            tuple(bytes.fromhex(digest) for digest in entry.sha256),
            entry.requests_per_minute,
            entry.tokens_per_minute,
        )
        for name, entry in entries.items()
    ]
