"""Malformed HTTP requests, as bytes to send."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from typing import Any

from tests.server.resilience.fuzzing import valid, values
from tests.server.resilience.fuzzing.case import Case
from tests.server.resilience.fuzzing.values import LARGEST_BODY

Make = Callable[[random.Random], bytes]


def _bytes(
    body: bytes,
    *,
    target: str = "/v2/models/ensemble/generate",
    method: str = "POST",
    length: int | str | None = None,
    headers: tuple[str, ...] = (),
) -> bytes:
    """Return a request with `Connection: close`; `length` -1 omits Content-Length."""
    said = len(body) if length is None else length
    lines = [f"{method} {target} HTTP/1.1", "Host: localhost", "Connection: close", *headers]
    if said != -1:
        lines.append(f"Content-Length: {said}")
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogateescape") + body


def _target(rng: random.Random, model: str = "ensemble") -> str:
    return f"/v2/models/{model}/{rng.choice(['generate', 'generate_stream'])}"


def _bad_json(rng: random.Random) -> bytes:
    text = json.dumps(valid.body(rng, "ensemble")).encode()
    cut = text[: rng.randrange(len(text))]
    bad = [cut, text + b"}", text + text, b"", b"{", b"nul", b"\x00", b"{'a':1}", b"[1,2", b"NaN"]
    bad += [b'{"text_input": "\xff"', text[:-1] + b",}", b"\x1f\x8b" + text]
    bad += [b'{"text_input": "\\ud800"}', b'{"text_input": "a\nb"}', b'{"max_tokens": 1e99999}']
    return _bytes(rng.choice(bad), target=_target(rng))


def _no_object(rng: random.Random) -> bytes:
    text = rng.choice([b"[]", b"null", b"1", b'"x"', b"[{}]", b"true", b'[["text_input"]]'])
    return _bytes(text, target=_target(rng))


_WRONG_TYPES: dict[str, list[Any]] = {
    "text_input": [1, None, {}, [1], ["a", "b"], []],
    "max_tokens": ["x", "", {}, [[]], 1.5, 2**31, -(2**70), [1, 2], 0, -1],
    "temperature": ["hot", {}, [], -1, 1e39],
    "seed": [-1, 2**64, "x", 1.5],
    "stop_words": [1, [1], {"a": 1}, [["x", 1]]],
    "sampling_parameters": ["x", "[]", {"max_tokens": 1}, 5],
    **{name: [1] for name in ("bogus", "", "x" * 5000, "__class__", "\x00")},
}


def _wrong_type(rng: random.Random) -> bytes:
    content = {**valid.body(rng, "ensemble"), "stream": False}
    name = rng.choice(list(_WRONG_TYPES))
    return _json({**content, name: rng.choice(_WRONG_TYPES[name])}, target=_target(rng))


def _json(content: Any, **options: Any) -> bytes:
    return _bytes(json.dumps(content).encode(), **options)


def _nested(rng: random.Random) -> bytes:
    left, right = rng.choice([("[", "]"), ('{"a":', "}")])
    deepest = (LARGEST_BODY - 100) // len(left + right)
    depth = rng.choice([10, 1000, 10_000, deepest])
    text = left * depth + "1" + right * depth
    text = rng.choice([text, f'{{"text_input": {text}, "max_tokens": 1}}', left * depth])
    return _bytes(text.encode(), target=_target(rng))


def _big(rng: random.Random) -> bytes:
    size = rng.choice([10**5, 10**6, 9 * 10**6])
    return _json({"text_input": "x" * size, "max_tokens": 1}, target=_target(rng))


def _method(rng: random.Random) -> bytes:
    method = rng.choice(["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "BREW"])
    return _json(valid.body(rng, "ensemble"), target=_target(rng), method=method)


def _path(rng: random.Random) -> bytes:
    paths = ["/", "/v2/models", "/v2/models/bogus/generate", "/v2/models/ensemble/versions/9/infer"]
    paths += ["/v1/x", "/v2/models/ensemble/generate/x", "/v2/models/../../etc/passwd"]
    paths += ["/v2/models/%00/infer", "/v2/models/ensemble/versions/abc/generate", "/%ff%fe"]
    paths += ["/v2/models//generate", "/v2/models/%2e%2e"]
    return _json(valid.body(rng, "ensemble"), target=rng.choice(paths))


def _infer(rng: random.Random) -> bytes:
    """The KServe form, with an error in the description of the tensors."""
    tensor: dict[str, Any] = {"name": "text_input", "datatype": "BYTES", "shape": [1, 1]}
    tensor["data"] = ["x"]
    field = rng.choice(["name", "datatype", "shape", "data"])
    bad: list[Any] = [
        None,
        "",
        "x",
        -1,
        {},
        [],
        [-1],
        [2**62, 2**62],
        [[["x"], ["y"]]],
        ["a", "b"],
        1.5,
        [1, "1"],
    ]
    tensor[field] = rng.choice(bad)
    content = {"inputs": rng.choice([[tensor], tensor, [tensor, tensor], [None], []])}
    model = rng.choice(valid.MODELS)
    return _json(content, target=f"/v2/models/{model}/infer")


def _binary_header(rng: random.Random) -> bytes:
    """KServe's binary extension, with wrong lengths."""
    size = rng.choice([0, 1, 5, 2**31, -1, 2**63])
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1, 1]}
    head = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": size}}]}).encode()
    said = rng.choice([0, -1, len(head) - 1, len(head) + 100, 2**31, 2**64, "x", ""])
    if rng.random() < 0.3:
        said = len(head)
    header = f"Inference-Header-Content-Length: {said}"
    target = f"/v2/models/{rng.choice(['tokenizer', 'ensemble'])}/infer"
    return _bytes(head + rng.randbytes(3), target=target, headers=(header,))


def _encoding(rng: random.Random) -> bytes:
    text = json.dumps(valid.body(rng, "ensemble")).encode()
    packed = gzip.compress(text, mtime=0)
    zeros = gzip.compress(bytes(20 * 10**6), mtime=0)
    name, content = rng.choice(
        [
            ("gzip", text),
            ("gzip", packed[:-9]),
            ("deflate", text),
            ("gzip", zeros),
            ("bogus", packed),
        ]
    )
    return _bytes(content, target=_target(rng), headers=(f"Content-Encoding: {name}",))


def _head(rng: random.Random) -> bytes:
    """Corrupt the request line or headers."""
    text = json.dumps(valid.body(rng, "ensemble")).encode()
    odd = [
        "No colon",
        ": no name",
        "X: " + "y" * 100_000,
        "X:\x01",
        "\udcff\udcfe: x",
        "Host: a, b",
    ]
    many = tuple(f"X-{i}: {i}" for i in range(2000))
    return rng.choice(
        [
            _bytes(text, headers=(rng.choice(odd),)),
            _bytes(text, headers=many),
            _bytes(text, headers=("Content-Length: 5",)),
            _bytes(text, length=rng.choice(["x", "-5", "0x10", "", str(2**64), "5 5"])),
            _bytes(text, method=rng.choice(["", "POST POST", "\x00", "P" * 9000])),
            _bytes(text).replace(
                b"HTTP/1.1", rng.choice([b"HTTP/9.9", b"HTTP", b"", b"HTTP/1.1 x"])
            ),
            _bytes(text, target=rng.choice(["*", "", "x y", "\x00", "/" * 5000])),
            rng.randbytes(rng.randint(1, 500)),
            b"\x16\x03\x01" + rng.randbytes(100),  # the start of a TLS handshake
        ]
    )


def _cut(rng: random.Random) -> bytes:
    whole = _json(valid.body(rng), target=_target(rng))
    return whole[: rng.randrange(1, len(whole))]


def _chunked(rng: random.Random) -> bytes:
    text = json.dumps(valid.body(rng, "ensemble")).encode()
    size = rng.choice(
        [b"zz", b"-5", b"", b"FFFFFFFFFFFFFFFFF", b"%x" % (len(text) + 5), b"0", b"1"]
    )
    chunks = size + b"\r\n" + text + b"\r\n0\r\n\r\n"
    headers = ("Transfer-Encoding: chunked",)
    return _bytes(b"", target=_target(rng), length=-1, headers=headers) + chunks


def _mutated(rng: random.Random) -> bytes:
    model = rng.choice(["ensemble", "engine"])
    head, _, content = _json(valid.body(rng, model), target=_target(rng, model)).partition(
        b"\r\n\r\n"
    )
    content = values.mutate(rng, content)
    return _bytes(content, target=head.split(b" ", 2)[1].decode())


_MUST_FAIL: dict[str, Make] = {
    "bad JSON": _bad_json,
    "no JSON object": _no_object,
    "wrong type": _wrong_type,
    "deep nesting": _nested,
    "prompt too long": _big,
    "wrong method": _method,
    "wrong path": _path,
    "bad tensors": _infer,
    "bad binary header": _binary_header,
    "bad content encoding": _encoding,
}
_BROKEN: dict[str, Make] = {
    "broken head": _head,
    "cut off": _cut,
    "bad chunks": _chunked,
    "mutated body": _mutated,
}


def make(rng: random.Random) -> Case:
    """Return a malformed HTTP request."""
    kinds = {**_MUST_FAIL, **_BROKEN}
    kind = rng.choice(sorted(kinds))
    return Case(
        f"http: {kind}",
        "http",
        kinds[kind](rng),
        must_fail=kind in _MUST_FAIL,
        may_close=kind in ("broken head", "cut off", "bad chunks"),
    )
