"""Who gets in: the gateway's own routes over real sockets, before a scripted server."""

from __future__ import annotations

import hashlib
import logging
import socket
from collections.abc import Iterator

import pytest
from starlette.routing import BaseRoute

from client.gateway.app import create_app
from client.gateway.routes import page
from client.gateway.security.access import OPEN_PATHS
from client.gateway.security.tenants import read_tenants
from client.gateway.settings import GatewaySettings
from tests.client.fake_triton import FakeTriton
from tests.client.gateway.asking import MARK, Reply, ask, complete
from tests.server.gateway.running import running

SETTINGS = GatewaySettings(tenants=read_tenants(("sk-x",), None))


@pytest.fixture(scope="module")
def settings(triton: FakeTriton, tmp_path_factory: pytest.TempPathFactory) -> GatewaySettings:
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    limits = {"alice": "", "bob": "", "rare": "requests_per_minute = 2"}
    limits["brief"] = "tokens_per_minute = 15"
    file.write_text(
        "\n".join(
            f'[{name}]\nsha256 = ["{hashlib.sha256(f"sk-{name}".encode()).hexdigest()}"]\n{limit}'
            for name, limit in limits.items()
        )
    )
    return GatewaySettings((triton.url,), tenants=read_tenants(("sk-x",), file))


@pytest.fixture(scope="module")
def gateway(settings: GatewaySettings) -> Iterator[str]:
    with running(settings) as address:
        yield address


def _routes() -> list[tuple[str, str]]:
    """Return method and path of all routes that the application has."""

    def flat(routes: list[BaseRoute]) -> Iterator[tuple[str, str]]:
        for route in routes:
            included = getattr(route, "original_router", route)  # FastAPI's later versions
            yield from flat(getattr(included, "routes", None) or [])
            path = getattr(route, "path", "")
            for method in getattr(route, "methods", None) or ():
                yield method, path.replace("{name:path}", "ensemble").replace("{name}", "ensemble")

    app = create_app(SETTINGS)
    found = set(flat(app.routes))
    assert {("POST", "/v1/chat/completions"), ("GET", "/openapi.json")} <= found
    documented = {path for path in app.openapi()["paths"] if "{" not in path}
    assert documented <= {path for _, path in found}
    return sorted(found)


def _is_refused(reply: Reply) -> None:
    assert reply.status == 401
    assert reply.headers["www-authenticate"] == "Bearer"


class TestRoutes:
    @pytest.mark.parametrize(("method", "path"), _routes())
    def test_none_answers_without_a_key(self, gateway: str, method: str, path: str) -> None:
        reply = ask(gateway, method, path)
        if path in OPEN_PATHS:
            assert reply.status == 200
        else:
            _is_refused(reply)

    def test_few_are_open(self) -> None:
        assert {"/health", "/health/ready"} | page.PATHS == OPEN_PATHS

    @pytest.mark.parametrize(
        "path",
        [
            "/nothing",
            "/page/nothing",
            "//v1/models",
            "/V1/models",
            "/v1/models/",
            "/health/",
            "/health/../v1/models",
            "/health/%2e%2e/v1/models",
            "/health;/v1/models",
            "/v1/models?/health",
            "/v1/models#/health",
            "http://x/v1/models",
        ],
    )
    @pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT"])
    def test_no_other_path_is(self, gateway: str, method: str, path: str) -> None:
        _is_refused(ask(gateway, method, path))

    @pytest.mark.parametrize("method", ["POST", "OPTIONS", "DELETE"])
    def test_open_ones_are_to_be_read(self, gateway: str, method: str) -> None:
        _is_refused(ask(gateway, method, "/health"))

    def test_a_web_socket_is_not(self, gateway: str) -> None:
        upgrade = {"upgrade": "websocket", "connection": "Upgrade"}
        key = {"sec_websocket_key": "dGhlIHNhbXBsZQ==", "sec_websocket_version": "13"}
        assert ask(gateway, "GET", "/health", **upgrade, **key).status == 200  # as without it
        _is_refused(ask(gateway, "GET", "/v1/models", **upgrade, **key))

    def test_refusal_comes_before_the_body(self, gateway: str) -> None:
        host, port = gateway.split(":")
        with socket.create_connection((host, int(port)), timeout=10) as peer:
            peer.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n")
            assert peer.recv(100).startswith(b"HTTP/1.1 401 ")


class TestKeys:
    @pytest.mark.parametrize(
        "headers",
        [
            {"authorization": "Bearer sk-alice"},
            {"authorization": "bearer  sk-alice "},
            {"x_api_key": "sk-alice"},
            {"authorization": "Bearer sk-x"},
        ],
    )
    def test_each_form_lets_in(self, gateway: str, headers: dict[str, str]) -> None:
        assert ask(gateway, "GET", "/v1/models", **headers).status == 200

    @pytest.mark.parametrize(
        "headers",
        [
            {"authorization": "Bearer sk-alic"},
            {"authorization": "Bearer sk-alice2"},
            {"authorization": "Bearer"},
            {"authorization": "Bearer "},
            {"authorization": "Basic sk-alice"},
            {"authorization": "sk-alice"},
            {"x_api_key": ""},
            {"x_api_key": hashlib.sha256(b"sk-alice").hexdigest()},
            {"authorization": "Bearer \xff"},
            {"cookie": "authorization=Bearer sk-alice"},
        ],
    )
    def test_nothing_else_does(self, gateway: str, headers: dict[str, str]) -> None:
        reply = ask(gateway, "GET", "/v1/models", **headers)
        _is_refused(reply)
        assert reply.error["code"] == "invalid_api_key"
        assert "sk-a" not in reply.body.decode()

    def test_without_keys_everybody_is_let_in(self, triton: FakeTriton) -> None:
        with running(GatewaySettings(triton_urls=(triton.url,))) as address:
            assert complete(address).status == 200
            assert complete(address, cache_salt="mine").status == 200
        assert [r["sampling_parameters"].get("cache_salt") for r in triton.requests[-2:]] == [
            None,
            "mine",
        ]


class TestTenants:
    def test_salts_and_ids_follow_from_the_key(self, gateway: str, triton: FakeTriton) -> None:
        salts, ids = [], []
        for key in ("sk-alice", "sk-bob"):
            for fields in ({}, {}, {"cache_salt": "s"}):
                reply = ask(
                    gateway,
                    "POST",
                    "/v1/completions",
                    {"prompt": "a", **fields},
                    authorization=f"Bearer {key}",
                    x_request_id="the same",
                )
                assert reply.status == 200
                salts.append(triton.requests[-1]["sampling_parameters"]["cache_salt"])
                ids.append(next(c.request_id for c in reversed(triton.calls) if c.request_id))
        assert triton.requests[-1]["sampling_parameters"]["tenant"] == "bob"
        assert "tenant_key" not in triton.requests[-1]["sampling_parameters"]
        assert salts[0] == salts[1]
        assert salts[3] == salts[4]
        assert len({salts[0], salts[2], salts[3], salts[5], "s"}) == 5
        assert len(set(ids)) == 6
        assert len({each.split("-")[0] for each in ids}) == 2

    def test_a_tenant_cannot_take_anothers_salt(self, gateway: str, triton: FakeTriton) -> None:
        complete(gateway, "sk-alice")
        salt = triton.requests[-1]["sampling_parameters"]["cache_salt"]
        complete(gateway, "sk-bob", cache_salt=salt)
        assert triton.requests[-1]["sampling_parameters"]["cache_salt"] != salt

    def test_prompts_are_tokenized_on_behalf_of_a_tenant(
        self, gateway: str, triton: FakeTriton
    ) -> None:
        """So one that has many counted takes no turn of the others before the tokenizer."""
        ask(gateway, "POST", "/tokenize", {"prompt": "a"}, authorization="Bearer sk-bob")
        assert triton.requests[-1]["sampling_parameters"] == {"tenant": "bob"}

    def test_requests_are_limited(self, gateway: str) -> None:
        replies = [complete(gateway, "sk-rare") for _ in range(3)]
        assert [reply.status for reply in replies] == [200, 200, 429]
        assert 20 < int(replies[2].headers["retry-after"]) <= 30
        assert replies[2].error["code"] == "rate_limit_exceeded"
        assert "2 requests per minute" in replies[2].error["message"]
        assert complete(gateway, "sk-bob").status == 200  # another's limit
        assert ask(gateway, "GET", "/v1/models", x_api_key="sk-rare").status == 200

    def test_tokens_are_limited(self, gateway: str) -> None:
        """Each answer costs 7 tokens of the prompt and 4 of its own."""
        replies = [complete(gateway, "sk-brief", stream=i == 0) for i in range(3)]
        assert [reply.status for reply in replies] == [200, 200, 429]
        # 7 more than 15 tokens were taken.
        assert 20 < int(replies[2].headers["retry-after"]) <= 28
        assert "15 tokens per minute" in replies[2].error["message"]


class TestBrowsers:
    ORIGIN = "https://app.example.org"

    def test_pages_of_other_sites_may_not_call(self, gateway: str) -> None:
        reply = ask(gateway, "GET", "/health", origin=self.ORIGIN)
        assert not any(name.startswith("access-control") for name in reply.headers)

    def test_those_that_are_named_may(self, triton: FakeTriton) -> None:
        settings = GatewaySettings(
            (triton.url,), tenants=read_tenants(("sk-x",), None), allowed_origins=(self.ORIGIN,)
        )
        preflight = {
            "access_control_request_method": "POST",
            "access_control_request_headers": "authorization, content-type",
        }
        with running(settings) as address:
            path = "/v1/completions"
            allowed = ask(address, "OPTIONS", path, origin=self.ORIGIN, **preflight)
            refused = ask(address, "OPTIONS", path, origin="https://evil.org", **preflight)
            _is_refused(ask(address, "POST", path, {"prompt": "a"}, origin=self.ORIGIN))
        assert allowed.status == 200
        assert allowed.headers["access-control-allow-origin"] == self.ORIGIN
        assert refused.status == 400
        assert "access-control-allow-origin" not in refused.headers


def test_no_prompt_and_no_key_is_logged(
    gateway: str, triton: FakeTriton, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "trident")
    caplog.set_level(logging.DEBUG, "uvicorn")
    complete(gateway, "sk-alice")
    complete(gateway, "sk-alice", stream=True)
    complete(gateway, "sk-alice", unknown=1)
    complete(gateway, "sk-wrong")
    ask(gateway, "POST", f"/v1/completions?prompt={MARK.split()[1]}", MARK.encode(), x_api_key="x")
    ask(gateway, "POST", "/v1/chat/completions", MARK.encode(), x_api_key="sk-alice")
    logged = "\n".join(record.getMessage() + str(record.exc_info) for record in caplog.records)
    assert "/v1/completions 200" in logged
    for secret in (MARK, MARK.split()[1], "sk-"):
        assert secret not in logged


@pytest.mark.parametrize("url", ["/", "/nothing"])
def test_limits_hold_in_the_gateway(gateway: str, url: str) -> None:
    key = {"x_api_key": "sk-alice"}
    assert ask(gateway, "POST", url, b"x" * (10 * 2**20 + 1), **key).status == 413
    assert ask(gateway, "POST", url, b"{}", a="b" * 50_000, c="d" * 50_000, **key).status == 431
