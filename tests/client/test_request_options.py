"""Log-probabilities and priority: as they are asked for, as they come back."""

import json
from typing import Any

import pytest

from client import InvalidRequestError, Logprob, ServerError, TokenLogprobs
from tests.client.clients import Connect
from tests.client.fake_triton import HELLO, FakeTriton, Piece


def _position(*tokens: tuple[int, str, float, int]) -> dict[str, Any]:
    return {
        str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": text}
        for token_id, text, logprob, rank in tokens
    }


FIRST = _position((5, "Hel", -2.5, 3), (7, "Hi", -0.5, 1), (9, "Yo", -1.5, 2))
SECOND = _position((2, "lo", -0.1, 1), (3, "p", -4.0, 2))
HEL = Logprob(5, "Hel", -2.5, 3)
LO = Logprob(2, "lo", -0.1, 1)


class TestLogprobs:
    def test_of_each_token(self, triton: FakeTriton, connect: Connect) -> None:
        triton.pieces = [
            Piece({0: "Hel"}, logprobs=(json.dumps([FIRST]),)),
            Piece({0: "lo"}, finished=(0,), final=True, logprobs=(json.dumps([SECOND]),)),
        ]
        expected = (
            TokenLogprobs(HEL, (Logprob(7, "Hi", -0.5, 1), Logprob(9, "Yo", -1.5, 2), HEL)),
            TokenLogprobs(LO, (LO, Logprob(3, "p", -4.0, 2))),
        )
        with connect(triton.url) as client:
            chunks = list(client.stream("a", logprobs=2))
            (output,) = client.generate("a", logprobs=2).outputs
        assert [chunk.logprobs for chunk in chunks] == [expected[:1], expected[1:]]
        assert output.logprobs == expected
        assert triton.requests[0]["sampling_parameters"] == {"logprobs": 2}

    def test_of_several_sequences(self, triton: FakeTriton, connect: Connect) -> None:
        contents = (json.dumps([FIRST, SECOND]), json.dumps([SECOND]))
        triton.pieces = [Piece({1: "a b", 0: "c"}, (0, 1), final=True, logprobs=contents)]
        with connect(triton.url) as client:
            first, second = client.generate("a", n=2, logprobs=2).outputs
        assert first.logprobs is not None
        assert second.logprobs is not None
        assert [each.chosen for each in first.logprobs] == [LO]
        assert [each.chosen for each in second.logprobs] == [HEL, LO]

    def test_of_the_prompt(self, triton: FakeTriton, connect: Connect) -> None:
        content = json.dumps([None, FIRST, SECOND])
        triton.pieces = [
            Piece({1: "a", 0: "b"}, prompt_logprobs=content),
            Piece({0: "c", 1: "d"}, (0, 1), final=True),
        ]
        with connect(triton.url) as client:
            chunks = list(client.stream("a", n=2, prompt_logprobs=2, max_tokens=0))
            completion = client.generate("a", n=2, prompt_logprobs=2)
        assert completion.prompt_logprobs is not None
        assert [each.chosen for each in completion.prompt_logprobs] == [HEL, LO]
        (found,) = (chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs is not None)
        assert found == completion.prompt_logprobs
        asked = triton.requests[0]["sampling_parameters"]
        assert asked == {"n": 2, "prompt_logprobs": 2, "max_tokens": 0}

    def test_of_a_part_of_a_character(self, triton: FakeTriton, connect: Connect) -> None:
        entry = {"logprob": -1.0, "rank": 1, "decoded_token": " \ufffd", "bytes": [32, 240]}
        triton.pieces = [Piece({0: ""}, (0,), final=True, logprobs=(json.dumps([{"4": entry}]),))]
        with connect(triton.url) as client:
            (position,) = client.generate("a", logprobs=0).outputs[0].logprobs or ()
        assert position.chosen == Logprob(4, " \ufffd", -1.0, 1, b" \xf0")

    def test_none_unless_asked_for(self, triton: FakeTriton, connect: Connect) -> None:
        triton.pieces = HELLO
        with connect(triton.url) as client:
            completion = client.generate("a")
            assert completion.outputs[0].logprobs is None
            assert completion.prompt_logprobs is None
            assert all(chunk.logprobs is None for chunk in client.stream("a"))

    @pytest.mark.parametrize("content", ["{", "[{}]", '[{"a": 1}]', '[{"1": {"rank": 1}}]', "3"])
    def test_unreadable(self, triton: FakeTriton, connect: Connect, content: str) -> None:
        triton.pieces = [Piece({0: "a"}, (0,), final=True, logprobs=(content,))]
        with connect(triton.url) as client, pytest.raises(ServerError, match="cannot be read"):
            client.generate("a", logprobs=1)


class TestPriority:
    def test_is_sent(self, triton: FakeTriton, connect: Connect) -> None:
        triton.pieces = HELLO
        with connect(triton.url) as client:
            client.generate("a", priority=-3)
            list(client.stream("a", priority=2))
            client.generate("a")
        assert [each.get("priority") for each in triton.requests] == [-3, 2, None]

    @pytest.mark.parametrize("priority", [2**31, 1.5, "high"])
    def test_must_be_an_integer(self, triton: FakeTriton, connect: Connect, priority: Any) -> None:
        with (
            connect(triton.url) as client,
            pytest.raises(InvalidRequestError, match="priority: must be a 32-bit integer"),
        ):
            client.generate("a", priority=priority)


def test_the_name_of_the_model(triton: FakeTriton, connect: Connect) -> None:
    triton.pieces = [Piece({0: "a"}), Piece({0: "b"}, delay_s=30)]
    with connect(triton.url, model="vllm_model") as client:
        chunks = client.stream("a")
        next(chunks)
        chunks.close()  # type: ignore[attr-defined]
    assert [call.model for call in triton.calls] == ["vllm_model"] * 2
    assert triton.stopped
    assert triton.configured == {"vllm_model"}


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((5,), {}, "text_input: must be a string"),
        (("a",), {"request_id": 5}, "request_id: must be a string"),
        ((), {"messages": [{"role": "user", "content": object()}]}, "messages: cannot be written"),
    ],
)
def test_wrong_types_are_named(
    connect: Connect, arguments: tuple[Any, ...], options: dict[str, Any], text: str
) -> None:
    with connect("localhost:9") as client, pytest.raises(InvalidRequestError, match=text):
        client.generate(*arguments, **options)


def test_text_that_is_not_unicode_is_an_error_of_the_server(
    triton: FakeTriton, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton.pieces = [Piece({0: "\udc80"}, (0,), final=True)]
    monkeypatch.setattr("tests.client.fake_triton.ENCODING_ERRORS", "surrogateescape")
    with connect(triton.url) as client, pytest.raises(ServerError, match="cannot be read"):
        client.generate("a")
