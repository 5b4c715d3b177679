import pytest

from engine.core import request_factory
from engine.core.request_factory import RequestFactory
from engine.errors import RequestError
from engine.protocol.messages import AddRequest
from engine.protocol.token_ids import pack_token_ids
from engine.text.detokenizer import Detokenizer
from engine.text.output_parsing.parser_spec import ParserSpec
from engine.text.stop.checker import StopAutomaton
from engine.text.tokenizer import Tokenizer
from tests.factories.tokenizers import byte_level_tokenizer


def make_factory() -> tuple[Tokenizer, RequestFactory]:
    tokenizer = Tokenizer(byte_level_tokenizer())
    factory = RequestFactory(
        tokenizer,
        Detokenizer(tokenizer),
        ParserSpec(tokenizer),
        eos_token_ids=[],
        vocab_size=tokenizer.vocab_size,
        max_model_len=64,
        max_logprobs=0,
        draw_seed=lambda: 0,
    )
    return tokenizer, factory


def test_the_sequences_of_a_request_share_what_finds_its_stop_strings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may take 100 MB, and a request may have 256 sequences."""
    built = []

    class Counted(StopAutomaton):
        def __init__(self, stop: tuple[str, ...]) -> None:
            built.append(stop)
            super().__init__(stop)

    monkeypatch.setattr(request_factory, "StopAutomaton", Counted)
    tokenizer, factory = make_factory()
    first, *others = factory.build(AddRequest(1, pack_token_ids([5]), {"n": 8, "stop": ["ab"]}))
    assert built == [("ab",)]
    checkers = {id(request.output.stop_checker) for request in (first, *others)}
    assert len(checkers) == 8
    checker = first.output.stop_checker
    assert checker is not None
    for token_id in tokenizer.encode("ab"):
        checker.append(token_id)
    assert checker.match is not None
    assert all(
        r.output.stop_checker is not None and r.output.stop_checker.match is None for r in others
    )


@pytest.mark.parametrize("seed", [-2, -(2**63), 2**63, 2**64 - 1])
def test_a_seed_of_64_bits_is_the_same_with_a_sign_and_without(seed: int) -> None:
    _, factory = make_factory()
    asked = AddRequest(1, pack_token_ids([5]), {"n": 3, "seed": seed, "temperature": 1.0})
    seeds = [request.seed for request in factory.build(asked)]
    assert seeds == [(seed + index) % 2**64 for index in range(3)]


@pytest.mark.parametrize("data", [b"\1", b"\5\0\0\0\6", b"\5\0\0\0" * 3 + b"\0\0\0"])
def test_a_prompt_of_half_a_token_id_is_refused(data: bytes) -> None:
    _, factory = make_factory()
    with pytest.raises(
        RequestError, match=rf"^input_ids: {len(data)} bytes are not a whole number"
    ):
        factory.build(AddRequest(1, data, {}))
