"""Clients that do not read what they asked for cost nobody else anything."""

import json
import socket

import pytest

from tests.server.caller import Caller
from tests.waiting import eventually

pytestmark = pytest.mark.server

NUM_TOKENS = 300
ASKED = {
    "text_input": "a slow reader",
    "sampling_parameters": json.dumps({"max_tokens": NUM_TOKENS, "ignore_eos": True}),
    "return_num_output_tokens": True,
}


def wait_until_idle(caller: Caller) -> None:
    assert eventually(
        lambda: not json.loads(caller.one("engine", health=True)["health"][0])["num_in_flight"]
    )


def open_http_stream(caller: Caller) -> socket.socket:
    host, port = caller.http_url.split(":")
    reader = socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)  # fills up at once
    reader.connect((host, int(port)))
    body = json.dumps({**ASKED, "stream": True}).encode()
    reader.sendall(
        b"POST /v2/models/ensemble/generate_stream HTTP/1.1\r\nHost: test\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    return reader


def test_the_engine_finishes_and_others_are_served_while_nobody_reads(caller: Caller) -> None:
    solo = caller.text(text_input="ab", max_tokens=100)
    unread = [caller.stream(stream=True, **ASKED) for _ in range(4)]
    first = [next(stream) for stream in unread]
    sockets = [open_http_stream(caller) for _ in range(4)]
    try:
        assert caller.text(text_input="ab", max_tokens=100) == solo
        wait_until_idle(caller)  # every block is free, though most answers are unread
        assert caller.text(text_input="ab", max_tokens=100) == solo
        for response, stream in zip(first, unread, strict=True):  # and nothing was lost
            counts = [r["num_output_tokens"][0] for r in [response, *stream]]
            assert sum(counts) == NUM_TOKENS
    finally:
        for reader in sockets:
            reader.close()
