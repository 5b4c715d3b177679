import contextlib
import json
import math
from collections.abc import Collection, Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from engine.errors import RequestError
from engine.protocol.messages import (
    NULL_LOGPROBS,
    Chunk,
    DetokenizerInput,
    OutputDetails,
    PromptLogprobs,
    RequestStats,
    TokenLogprobs,
)
from engine.protocol.prompt_logprobs import pack
from engine.protocol.token_ids import pack_token_ids
from engine.service.link import DetokenizerEnd, EngineEnd
from engine.service.outputs import Array, chunk_tensors
from engine.service.stages.postprocessor import Postprocessor, decode_message
from engine.text.output_parsing.parser_spec import ParserSpec
from engine.text.tokenizer import Tokenizer
from tests.engine.service.stub.test_stream import out
from tests.factories.tagged import format_of, tagged
from tests.factories.tokenizers import byte_level_tokenizer

TOKENIZER = Tokenizer(byte_level_tokenizer())
POSTPROCESS = Postprocessor(TOKENIZER, ParserSpec(TOKENIZER))
END = TOKENIZER.eos_token_id
assert END is not None


def texts(*chunks: Chunk, **options: bool) -> list[str]:
    outputs = POSTPROCESS(DetokenizerInput(1, list(chunks), **options))
    assert list(outputs) == ["text_output"]
    return [value.decode() for value in outputs["text_output"]]


def tensors_of(chunks: list[Chunk], wanted: Collection[str]) -> dict[str, Array]:
    return chunk_tensors(chunks, wanted, num_prompt_tokens=40, block_size=16)


def test_a_character_comes_when_it_is_complete() -> None:
    ids = TOKENIZER.encode("a🎉b")
    pieces = []
    for index, token_id in enumerate(ids):
        last = index == len(ids) - 1
        pieces += texts(out(0, token_id, window=ids[:index], finish="stop" if last else None))
    assert "".join(pieces) == "a🎉b"
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    assert "" in pieces


def test_text_is_cut_and_prefixed() -> None:
    ids = TOKENIZER.encode("one stop")
    chunk = out(0, *ids, finish="stop", text_cut=5)
    assert texts(structs.replace(chunk, text_prefix="P ")) == ["P one"]
    assert texts(out(0, window=ids, finish="stop")) == [""]


def test_sections_come_as_json_for_those_who_ask() -> None:
    detokenizer = tagged(("<think>", "</think>"), "special")
    postprocess = Postprocessor(detokenizer.tokenizer, format_of(detokenizer))
    encode = detokenizer.tokenizer.encode
    thought, said, done = encode("hm"), encode("</think>a stop"), encode("b")
    inside = [*thought, *said]
    chunks = [out(0, *inside, finish="stop", text_cut=5, parser_state=(1, 4)), out(1, *done)]
    outputs = postprocess(DetokenizerInput(1, chunks, outputs=["sections"]))
    assert [json.loads(value) for value in outputs["sections"]] == [
        [
            {"type": "reasoning", "index": 4, "text": "hm", "num_tokens": len(thought)},
            {
                "type": "content",
                "index": 5,
                "text": "a",
                "tag": "</think>",
                "num_tokens": len(said),
            },
        ],
        [{"type": "content", "index": 0, "text": "b", "num_tokens": len(done)}],
    ]
    assert [value.decode() for value in outputs["text_output"]] == ["hma", "b"]


def test_special_tokens_are_left_out_unless_wanted() -> None:
    chunk = out(0, *TOKENIZER.encode("x"), END, finish="stop")
    assert texts(chunk) == ["x"]
    assert texts(chunk, skip_special_tokens=False) == ["x<|end|>"]


def test_only_what_was_asked_for_comes_with_one_element_per_chunk() -> None:
    first = TokenLogprobs([5, 6, 5], [-0.5, -math.inf, -0.5], [1, 9, 1])
    stats = RequestStats(40, 33, 2, 0, 1.0, 2.0, 3.0, 4.5, 8, 6)
    chunks = [
        out(
            *(0, 5, 5),
            finish="length",
            logprobs=[first, first],
            cumulative_logprob=-1.0,
            stats=stats,
        ),
        out(2, 6, logprobs=[first], cumulative_logprob=-0.5),
    ]
    wanted = ["logprobs", "finish_reason", "sequence_index", "num_input_tokens"]
    wanted += ["kv_cache_reused_blocks", "last_token_time_ns", "cum_log_probs", "output_log_probs"]
    wanted += ["cumulative_logprob", "num_cached_tokens", "stop_reason"]
    wanted += ["kv_cache_alloc_new_blocks", "kv_cache_alloc_total_blocks", "acceptance_rate"]
    wanted += ["total_draft_tokens", "total_accepted_draft_tokens"]
    texts = POSTPROCESS(DetokenizerInput(1, chunks, outputs=wanted))
    assert set(texts) == {"text_output", "logprobs"}
    outputs = tensors_of(chunks, wanted)
    assert {*texts, *outputs} == {"text_output", *wanted}
    assert outputs["finish_reason"].tolist() == [b"length", b"None"]
    assert outputs["stop_reason"].tolist() == [b"null", b"null"]
    assert outputs["sequence_index"].tolist() == [0, 2]
    assert outputs["num_input_tokens"].tolist() == [40]
    assert outputs["kv_cache_reused_blocks"].tolist() == [2, 0]
    assert outputs["kv_cache_alloc_new_blocks"].tolist() == [1, 0]
    assert outputs["kv_cache_alloc_total_blocks"].tolist() == [1, 0]
    assert outputs["acceptance_rate"].tolist() == [0.75, 0]
    assert outputs["total_draft_tokens"].tolist() == [8, 0]
    assert outputs["total_accepted_draft_tokens"].tolist() == [6, 0]
    assert outputs["num_cached_tokens"].tolist() == [33, 0]
    assert outputs["last_token_time_ns"].tolist() == [4_500_000_000, 0]
    assert outputs["cum_log_probs"].tolist() == [-1.0, -0.5]
    assert outputs["cumulative_logprob"].tolist() == [-1.0, -0.5]
    assert outputs["output_log_probs"].tolist() == [-0.5, -0.5, -0.5]
    positions = json.loads(texts["logprobs"][0])
    assert len(positions) == 2
    assert positions[0] == {
        "5": {"logprob": -0.5, "rank": 1, "decoded_token": TOKENIZER.token_text(5)},
        "6": {"logprob": -9999.0, "rank": 9, "decoded_token": TOKENIZER.token_text(6)},
    }


def test_a_part_of_a_character_has_its_bytes() -> None:
    ids = TOKENIZER.encode("a🎉")
    chunk = out(0, *ids, logprobs=[TokenLogprobs([i], [-1.0], [1]) for i in ids])
    (content,) = POSTPROCESS(DetokenizerInput(1, [chunk], outputs=["logprobs"]))["logprobs"]
    entries = [entry for position in json.loads(content) for entry in position.values()]
    assert "bytes" not in entries[0]  # its text says it all
    parts = [bytes(each.get("bytes", each["decoded_token"].encode())) for each in entries]
    assert b"".join(parts).decode() == "a🎉"


def prompt_scores() -> PromptLogprobs:
    return pack(
        np.array([6, 5], dtype=np.int32),
        np.array([-math.inf, -0.5], dtype=np.float32),
        np.array([9, 1], dtype=np.int32),
        np.array([[5], [5]], dtype=np.int32),
        np.array([[-0.25], [-0.5]], dtype=np.float32),
    )


def test_log_probabilities_of_the_prompt_come_once_whatever_the_chunks() -> None:
    chunks = [out(0, 5, prompt_logprobs=prompt_scores()), out(1, 6)]
    wanted = ["prompt_logprobs", "prompt_log_probs"]
    numbers = tensors_of(chunks, wanted)
    assert list(numbers) == ["prompt_log_probs"]
    assert numbers["prompt_log_probs"].tolist() == [-math.inf, -0.5]
    assert numbers["prompt_log_probs"].dtype == np.float32
    outputs = POSTPROCESS(DetokenizerInput(1, chunks, outputs=wanted))
    five, six = TOKENIZER.token_text(5), TOKENIZER.token_text(6)
    (content,) = outputs["prompt_logprobs"]
    assert json.loads(content) == [
        None,
        {
            "6": {"logprob": -9999.0, "rank": 9, "decoded_token": six},
            "5": {"logprob": -0.25, "rank": 1, "decoded_token": five},
        },
        {"5": {"logprob": -0.5, "rank": 1, "decoded_token": five}},
    ]
    later = POSTPROCESS(DetokenizerInput(1, chunks[1:], outputs=wanted))
    assert list(later) == ["text_output"]
    assert tensors_of(chunks[1:], wanted) == {}


def test_logprobs_that_nobody_asked_to_compute_are_null() -> None:
    chunks = [
        out(0, 5),
        out(1, 6, logprobs=[TokenLogprobs([6], [-1.0], [1])]),
    ]
    outputs = POSTPROCESS(DetokenizerInput(1, chunks, outputs=[NULL_LOGPROBS]))
    assert outputs["logprobs"].tolist() == [b"null", b"null"]


def test_without_text_the_tokens_come_flat() -> None:
    wanted = {"token_ids", "num_output_tokens", "sequence_index", "cum_log_probs", "text_output"}
    outputs = tensors_of([out(1, 5, 6, window=[1]), out(0, finish="stop")], wanted)
    assert set(outputs) == wanted - {"cum_log_probs", "text_output"}
    assert outputs["token_ids"].tolist() == [5, 6]
    assert outputs["token_ids"].dtype == np.int32
    assert outputs["num_output_tokens"].tolist() == [2, 0]
    assert outputs["sequence_index"].tolist() == [1, 0]


@pytest.fixture
def engine() -> Iterator[EngineEnd]:
    end = EngineEnd(lambda uid: None, lambda uid, error: None, lambda number: None)
    yield end
    end.close()


def test_only_what_the_engine_sealed_is_decoded(engine: EngineEnd) -> None:
    message = DetokenizerInput(1, [out(0, 65)], check_cancelled=True)
    data = msgspec.msgpack.encode(message)
    detokenizer = DetokenizerEnd()
    assert decode_message(memoryview(engine.seal(data)), detokenizer) == message
    for forged in (b"", data, b"\x91" * 5000, engine.seal(b"")[:40] + data):
        with pytest.raises(RequestError, match=r"^detokenizer_input: is set by the engine stage"):
            decode_message(memoryview(forged), detokenizer)
    detokenizer.close()


@pytest.mark.parametrize(
    ("window_ids", "token_ids", "error"),
    [
        (b"", b"\1\0\0", "token_ids: 3 bytes are not a whole number"),
        (b"\1", b"", "window_ids: 1 bytes are not a whole number"),
        (b"", pack_token_ids([5, -2, 6]), "token_ids: token id -2 is negative"),
        (pack_token_ids([-(2**31)]), b"", "window_ids: token id -2147483648 is negative"),
    ],
)
def test_ids_that_cannot_be_decoded_are_refused_by_name(
    window_ids: bytes, token_ids: bytes, error: str
) -> None:
    with pytest.raises(RequestError, match=f"^{error}"):
        texts(Chunk(0, window_ids, token_ids))


@given(st.binary(max_size=40), st.binary(max_size=40), st.integers(0, 2**31 - 1))
def test_no_bytes_of_ids_raise_anything_but_a_request_error(
    window_ids: bytes, token_ids: bytes, index: int
) -> None:
    chunk = Chunk(index, window_ids, token_ids, OutputDetails(finish_reason="stop", text_cut=1))
    with contextlib.suppress(RequestError):
        texts(chunk)
