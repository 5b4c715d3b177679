"""Keys and the file of keys."""

import hashlib
import re
from pathlib import Path

import pytest

from client import ConfigurationError
from client.gateway.security.tenants import Tenant, read_tenants


def _sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _file(folder: Path, text: str) -> Path:
    file = folder / "keys.toml"
    file.write_text(text)
    return file


def test_without_keys_everybody_may_ask() -> None:
    assert read_tenants([], None) is None


def test_keys_and_a_file_add_up(tmp_path: Path) -> None:
    file = _file(
        tmp_path,
        f"""
        [alice]
        sha256 = ["{_sha256("sk-a1")}", "{_sha256("sk-a2")}"]
        requests_per_minute = 60
        tokens_per_minute = 1000

        [bob]
        sha256 = ["{_sha256("sk-b")}"]
        """,
    )
    found = read_tenants(["sk-c"], file)
    assert found is not None
    alice = found.with_key(b"sk-a1")
    assert alice is not None
    assert alice == found.with_key(b"sk-a2")
    assert (alice.name, alice.requests_per_minute, alice.tokens_per_minute) == ("alice", 60, 1000)
    bob = found.with_key(b"sk-b")
    assert bob is not None
    assert (bob.name, bob.requests_per_minute, bob.tokens_per_minute) == ("bob", None, None)
    assert (other := found.with_key(b"sk-c")) is not None
    assert other.name == f"key-{_sha256('sk-c')[:8]}"
    for wrong in (b"", b"sk-", b"sk-a", b"sk-a1 ", b"SK-A1", _sha256("sk-a1").encode(), b"\xff"):
        assert found.with_key(wrong) is None


def test_no_key_is_kept(tmp_path: Path) -> None:
    found = read_tenants(["sk-secret"], None)
    assert "sk-secret" not in repr(vars(found))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no keys"),
        ("[alice]", "alice.sha256: Field required"),
        ("[alice]\nsha256 = []", "alice.sha256: List should have at least 1 item"),
        ('[alice]\nsha256 = ["sk-plain"]', r"alice.sha256.0: String should match pattern"),
        (f'[alice]\nsha256 = ["{"a" * 64}"]\nlimit = 3', "alice.limit: Extra inputs"),
        (f'[a]\nsha256 = ["{"a" * 64}"]\ntokens_per_minute = 0', "a.tokens_per_minute: .* 1"),
        (f'[a]\nsha256 = ["{"a" * 64}"]\n[b]\nsha256 = ["{"a" * 64}"]', "b and a have the same"),
        ("sk-plain", "Expected '='"),
        ('key = "sk-plain"', "key: Input should be"),
    ],
)
def test_a_wrong_file_is_refused_without_telling_its_keys(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said) as caught:
        read_tenants([], _file(tmp_path, text))
    assert "sk-plain" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"{tmp_path / 'x'}: No such file")):
        read_tenants([], tmp_path / "x")


def test_an_empty_key_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="api_key: must not be empty"):
        read_tenants([" "], None)


def test_salts_and_ids_are_a_tenants_own() -> None:
    alice, bob = Tenant("alice", (b"a" * 32,)), Tenant("bob", (b"b" * 32,))
    salts = {each.cache_salt(own) for each in (alice, bob) for own in ("", "x", "y")}
    assert len(salts) == 6
    assert alice.cache_salt("x") == Tenant("other name", (b"a" * 32, b"c" * 32)).cache_salt("x")
    # Whatever an id a tenant names, it is not another's.
    assert alice.request_id(bob.request_id("x")) != bob.request_id("x")
    assert not alice.request_id("").startswith(bob.request_id(""))
