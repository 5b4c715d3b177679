"""The text of the chunks of a sequence, however it ends."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.output_builder import OutputBuilder
from engine.core.request import Request
from engine.core.seq_slots import SeqSlots
from engine.protocol.messages import SequenceOutput
from engine.request.sampling_params import SamplingParams
from engine.text.detokenizer import Detokenizer
from engine.text.stop.automaton import StopAutomaton
from engine.text.stop.checker import StopChecker
from engine.text.tokenizer import Tokenizer
from tests.engine.text.strategies import Sequences, sequences
from tests.factories.requests import append_tokens
from tests.factories.tokenizers import byte_fallback_tokenizer, byte_level_tokenizer

DETOKENIZERS = {
    "byte_level": Detokenizer(Tokenizer(byte_level_tokenizer())),
    "byte_fallback": Detokenizer(Tokenizer(byte_fallback_tokenizer())),
}


@pytest.fixture(scope="module", params=DETOKENIZERS)
def detokenizer(request: pytest.FixtureRequest) -> Detokenizer:
    return DETOKENIZERS[request.param]


@dataclass
class Answer:
    outputs: list[SequenceOutput]
    text: str
    request: Request


def answer(
    detokenizer: Detokenizer,
    sequence: Sequences,
    *,
    stream_interval: int = 1,
    stop_token_ids: frozenset[int] = frozenset(),
    max_tokens: int | None = None,
    abort: bool = False,
    **sampling: object,
) -> Answer:
    """Return what the client gets for tokens that the model chooses."""
    prompt, tokens, skip = sequence
    params = SamplingParams.parse({"skip_special_tokens": skip, "max_tokens": None, **sampling})
    window = detokenizer.prompt_window(prompt, skip_special_tokens=skip)
    checker = StopChecker(
        detokenizer,
        window,
        StopAutomaton(params.stop),
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=skip,
    )
    request = Request(
        1,
        np.array(prompt, dtype=np.int32),
        params,
        max_tokens=max_tokens or len(tokens) + 1,
        seed=0,
        stop_token_ids=stop_token_ids,
        stop_checker=checker if params.stop else None,
        window_ids=window,
    )
    opens_window = detokenizer.token_flags(detokenizer.tokenizer.vocab_size + 3).opens_window
    states = SeqSlots(1, 1, 1)
    builder = OutputBuilder(detokenizer, opens_window, states, stream_interval=stream_interval)
    outputs = []
    for token_id in tokens:
        append_tokens(request, [token_id])
        ended = token_id in stop_token_ids or request.num_output_tokens == request.max_tokens
        request.examine(token_id, "length" if ended else None)  # a stop token is found
        if (output := builder.build(request)) is not None:
            outputs.append(output)
        if request.finish is not None:
            break
    if abort:
        request.abort()
        last = builder.build(request)
        assert last is not None
        outputs.append(last)
    text = "".join(
        detokenizer.text(each.window_ids, each.token_ids, each, skip_special_tokens=skip)
        for each in outputs
    )
    return Answer(outputs, text, request)


def emoji_bytes(detokenizer: Detokenizer) -> list[int]:
    return detokenizer.tokenizer.encode("🦊", add_special_tokens=False)[-4:]


@pytest.mark.parametrize("stream_interval", [1, 99])
def test_a_stop_token_that_completes_a_character_is_not_part_of_the_text(
    detokenizer: Detokenizer, stream_interval: int
) -> None:
    """What is left of the character is what its other bytes decode to without the last."""
    *first, last = emoji_bytes(detokenizer)
    got = answer(
        detokenizer,
        Sequences([5], [*first, last], True),
        stop_token_ids=frozenset([last]),
        stream_interval=stream_interval,
    )
    window = detokenizer.prompt_window([5])
    assert got.text == detokenizer.delta(window, first, final=True)
    assert got.outputs[-1].text_cut == 0
    assert got.outputs[-1].stop_reason == last
    assert [i for output in got.outputs for i in output.token_ids] == [*first, last]


def test_a_stop_token_that_is_kept_completes_its_character(detokenizer: Detokenizer) -> None:
    *first, last = emoji_bytes(detokenizer)
    got = answer(
        detokenizer,
        Sequences(detokenizer.tokenizer.encode("a"), [*first, last], True),
        stop_token_ids=frozenset([last]),
        include_stop_str_in_output=True,
    )
    assert got.text == "🦊"


@given(data=st.data())
def test_the_text_is_the_full_decode_without_the_stop_token(
    detokenizer: Detokenizer, data: st.DataObject
) -> None:
    sequence = data.draw(sequences(detokenizer))
    prompt, tokens, skip = sequence
    stop_token_ids = frozenset(data.draw(st.lists(st.sampled_from(tokens or [0]), max_size=2)))
    include = data.draw(st.booleans())
    abort = not stop_token_ids & {*tokens}
    got = answer(
        detokenizer,
        sequence,
        stop_token_ids=stop_token_ids,
        include_stop_str_in_output=include,
        stream_interval=data.draw(st.integers(1, 4)),
        abort=abort,
    )
    end = next((i for i, token in enumerate(tokens) if token in stop_token_ids), len(tokens))
    shown = tokens[: end + 1] if include else tokens[:end]
    window = detokenizer.prompt_window(prompt, skip_special_tokens=skip)
    assert got.text == detokenizer.delta(window, shown, final=True, skip_special_tokens=skip)
    assert got.request.finish_reason == ("abort" if abort else "stop")


@given(data=st.data())
def test_a_stop_string_cuts_the_text_however_the_sequence_ended(
    detokenizer: Detokenizer, data: st.DataObject
) -> None:
    """It may be complete only when a stop token or the length ends the text that was held back."""
    sequence = data.draw(sequences(detokenizer))
    prompt, tokens, skip = sequence
    window = detokenizer.prompt_window(prompt, skip_special_tokens=skip)
    text = detokenizer.delta(window, tokens, final=True, skip_special_tokens=skip)
    start = data.draw(st.integers(0, max(0, len(text) - 1)))
    stop = text[start : start + data.draw(st.integers(1, 3))] or "x"
    got = answer(
        detokenizer,
        sequence,
        stop=[stop],
        stop_token_ids=frozenset(data.draw(st.lists(st.sampled_from(tokens or [0]), max_size=1))),
        max_tokens=data.draw(st.integers(1, len(tokens) + 1)),
        stream_interval=data.draw(st.integers(1, 4)),
    )
    finish = got.request.finish
    if finish is None:
        return
    shown = got.request.token_ids[len(prompt) :].tolist()
    shown = shown[:-1] if finish.omit_stop_token else shown
    text = detokenizer.delta(window, shown, final=True, skip_special_tokens=skip)
    assert [i for output in got.outputs for i in output.token_ids][: len(shown)] == shown
    if finish.stop_reason == stop:
        assert text.startswith(got.text + stop)
    else:
        assert finish.text_cut == 0
        assert got.text == text


def test_the_windows_of_a_long_run_of_bytes_are_linear_in_its_length() -> None:
    detokenizer = DETOKENIZERS["byte_fallback"]
    tokens = emoji_bytes(detokenizer) * 500
    got = answer(detokenizer, Sequences([], tokens, True), max_tokens=len(tokens))
    assert got.text == "🦊" * 500
    assert got.request.finish_reason == "length"
    assert sum(len(output.window_ids) for output in got.outputs) <= 40 * len(tokens)
    assert len(got.outputs) > 100


def test_a_run_that_is_no_utf_8_streams_with_a_short_window() -> None:
    detokenizer = DETOKENIZERS["byte_fallback"]
    tokens = emoji_bytes(detokenizer)[:1] * 300
    got = answer(detokenizer, Sequences([], tokens, True), max_tokens=len(tokens))
    assert got.text == "\N{REPLACEMENT CHARACTER}" * 300
    assert len(got.outputs) == 300
    assert max(len(output.window_ids) for output in got.outputs) <= 16
