"""Every input has a limit: by its type, or by a refusal that names it.

The inputs are read from the model repository, so that a new one without a limit fails here.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from engine.core.request import Request
from engine.core.request_factory import RequestFactory
from engine.errors import RequestError, shown
from engine.protocol.messages import AddRequest, Ready
from engine.protocol.token_ids import pack_token_ids
from engine.request.generation_defaults import GenerationDefaults
from engine.request.sampling_params import SamplingParams
from engine.service.parameters import decode_parameters
from engine.service.sampling_inputs import REFUSED
from engine.service.stages.preprocessor import Preprocessor
from engine.service.stages.request_inputs import parse_inputs
from engine.service.stages.tokenized_request import engine_tensors
from engine.service.stub.engine_inputs import parse_engine_inputs
from engine.text.detokenizer import Detokenizer
from engine.text.output_parsing.parser_spec import ParserSpec
from engine.text.tokenizer import Tokenizer
from engine.validation import limits
from tests.factories.tokenizers import byte_level_tokenizer

REPOSITORY = Path(__file__).parents[4] / "model_repository"
MAX_MODEL_LEN, VOCAB = 64, 400
READY = Ready(MAX_MODEL_LEN, VOCAB, 10, 16, 144, 64, "")
TOKENIZER = Tokenizer(byte_level_tokenizer())
DEFAULTS = GenerationDefaults((0,), 0, do_sample=False, sampling={})
PREPROCESS = Preprocessor(TOKENIZER, DEFAULTS, max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB)


def make_factory(max_model_len: int) -> RequestFactory:
    return RequestFactory(
        TOKENIZER,
        Detokenizer(TOKENIZER),
        ParserSpec(TOKENIZER),
        eos_token_ids=[0],
        vocab_size=VOCAB,
        max_model_len=max_model_len,
        max_logprobs=20,
        draw_seed=lambda: 0,
    )


FACTORY = make_factory(MAX_MODEL_LEN)

DTYPES = {
    model_config_pb2.TYPE_BOOL: np.bool_,
    model_config_pb2.TYPE_INT32: np.int32,
    model_config_pb2.TYPE_UINT64: np.uint64,
    model_config_pb2.TYPE_FP32: np.float32,
}


def text(*values: str) -> np.ndarray:
    return np.array([[value.encode() for value in values]], dtype=object)


def numbers(size: int, dtype: type = np.float32) -> np.ndarray:
    return np.zeros((1, size), dtype=dtype)


WORDS = [str(i) for i in range(limits.MAX_WORDS + 1)]
LONG_WORD = "x" * (limits.MAX_WORD_CHARACTERS + 1)
MANY_CHARACTERS = ["y" * 1000] * 9
TOO_LONG = "a " * limits.max_prompt_characters(MAX_MODEL_LEN)
HI = {"role": "user", "content": "hi"}

# One value beyond the limit, or several, of each input that its type does not bound.
BEYOND: dict[str, dict[str, list[np.ndarray]]] = {
    "ensemble": {
        "text_input": [text(TOO_LONG), text("a" * 1000)],
        "messages": [
            text(json.dumps([{"role": "user", "content": TOO_LONG * 10}])),
            text(json.dumps([HI] * (limits.MAX_MESSAGES + 1))),
            text(f"[{',' * 2**15}]"),
            text("[" * 100_000),
        ],
        "chat_parameters": [
            text(json.dumps({"tools": "x" * limits.MAX_CHAT_CHARACTERS})),
            text('{"a":' * 100_000),
        ],
        "input_ids": [numbers(MAX_MODEL_LEN, np.int32), np.full((1, 3), VOCAB, dtype=np.int32)],
        "sampling_parameters": [
            text(json.dumps({"stop": "x" * limits.MAX_SAMPLING_CHARACTERS})),
            text(json.dumps({f"k{i}": 1 for i in range(limits.MAX_SAMPLING_FIELDS + 1)})),
            text('{"a":' * 100_000),
        ],
        "stop_words": [text(*WORDS), text(LONG_WORD), text(*MANY_CHARACTERS)],
        "bad_words": [text(*WORDS), text(LONG_WORD), text(*MANY_CHARACTERS)],
        "embedding_bias_words": [text(*WORDS), text(LONG_WORD), text(*MANY_CHARACTERS)],
        "embedding_bias_weights": [numbers(limits.MAX_WORDS + 1)],
        "guided_decoding_guide_type": [text("x" * 1000)],
        "guided_decoding_guide": [text("x")],
        "sampling_param_stop": [text(*WORDS), text(LONG_WORD), text(*MANY_CHARACTERS)],
    },
    "engine": {
        "input_ids": [numbers(MAX_MODEL_LEN, np.int32), np.full((1, 3), VOCAB, dtype=np.int32)],
        "sampling_parameters": [text('{"stop": "%s"}' % ("x" * limits.MAX_SAMPLING_CHARACTERS))],
        "response_options": [numbers(2**19, np.uint8)],
        "guided_decoding_guide_type": [text("x" * 1000)],
        "guided_decoding_guide": [text("x")],
    },
}


def serve(model: str, tensors: dict[str, np.ndarray], **more: Any) -> list[Request]:
    """Take a request through all that is before the scheduler."""
    if model == "ensemble":
        if "chat_parameters" in tensors:
            tensors = {"messages": text(json.dumps([HI])), **tensors}
        elif not {"messages", "input_ids"} & tensors.keys():
            tensors = {"text_input": text("hello"), **tensors}
        tensors = engine_tensors(PREPROCESS(parse_inputs(tensors, {})))
    else:
        tensors = {"input_ids": np.array([[5, 6]], dtype=np.int32), **tensors}
    request = parse_engine_inputs(tensors, {}, 0, READY, **more).request
    return FACTORY.build(
        AddRequest(
            1,
            pack_token_ids(request.prompt_token_ids),
            request.sampling_params,
            priority=request.priority,
            timeout_s=request.timeout_s,
            stream=request.stream,
        )
    )


def refusal(model: str, tensors: dict[str, np.ndarray]) -> str | None:
    """Return why a request is refused; None if it is served."""
    try:
        serve(model, tensors)
    except RequestError as error:
        return str(error)
    return None


def inputs_of(model: str, config: str) -> Iterator[Any]:
    path = REPOSITORY / model / config
    parsed = text_format.Parse(path.read_text(encoding="utf-8"), model_config_pb2.ModelConfig())
    return iter(parsed.input)


CONFIGS = ("config.pbtxt", "configs/vllm.pbtxt")
# The model that answers once takes all that the ensemble takes, and more.
INPUTS = {
    (model, tensor.name): tensor
    for model, folder in (("ensemble", "tensorrt_llm_bls"), ("engine", "engine"))
    for config in CONFIGS
    for tensor in inputs_of(folder, config)
}


def extremes(dtype: type) -> list[Any]:
    if dtype is np.bool_:
        return [False, True]
    if dtype is np.float32:
        largest = float(np.finfo(np.float32).max)
        return [-largest, largest, 0.0, 1e-45, float("nan"), float("inf"), -float("inf")]
    bounds = np.iinfo(dtype)  # type: ignore[type-var]
    return [int(bounds.min), int(bounds.max), 0]


@pytest.mark.parametrize(("model", "name"), INPUTS)
def test_each_input_is_bounded(model: str, name: str) -> None:
    tensor = INPUTS[model, name]
    if name in REFUSED:
        assert str(refusal(model, {name: text("x")})).startswith(f"{name}: not supported")
        return
    dtype = DTYPES.get(tensor.data_type)
    if list(tensor.dims) == [1] and dtype is not None:
        for value in extremes(dtype):
            error = refusal(model, {name: np.array([[value]], dtype=dtype)})
            assert error is None or error.startswith(f"{name}: "), value
        return
    for value in BEYOND[model][name]:  # a KeyError: this input has no limit yet
        error = refusal(model, {name: value})
        assert error is not None
        assert error.startswith((f"{name}: ", f"{name}.", f"{name}["))
        assert len(shown(error)) <= 1000


def test_no_limit_stands_in_the_table_for_an_input_that_has_gone() -> None:
    assert {(model, name) for model in BEYOND for name in BEYOND[model]} <= set(INPUTS)


BEYOND_FIELDS: dict[str, list[Any]] = {
    "stop": [WORDS, LONG_WORD, MANY_CHARACTERS, [[]] * 1000],
    "bad_words": [WORDS, LONG_WORD, MANY_CHARACTERS],
    "stop_token_ids": [[1] * (limits.MAX_STOP_TOKEN_IDS + 1), [VOCAB]],
    "allowed_token_ids": [[1] * (limits.MAX_ALLOWED_TOKEN_IDS + 1), [VOCAB], [2**31]],
    "logit_bias": [
        {str(i): 1.0 for i in range(limits.MAX_LOGIT_BIAS + 1)},
        *({VOCAB: 1.0}, {1: 100.1}, {1: -1e308}),
    ],
    "dry_sequence_breakers": [["x"] * (limits.MAX_DRY_BREAKERS + 1), "x" * 41],
    "logits_processors": [["x"] * (limits.MAX_LOGITS_PROCESSORS + 1), ["x"], ["x" * 1025]],
}
SCALARS = [-1, 0, 2**31, 2**64, 10**30, -1e308, 1e308, "9" * 5000, True]


@pytest.mark.parametrize("field", SamplingParams.model_fields)
def test_each_field_of_the_sampling_parameters_is_bounded(field: str) -> None:
    scalar = field not in BEYOND_FIELDS
    for value in SCALARS if scalar else BEYOND_FIELDS[field]:
        tensors = {"sampling_parameters": text(json.dumps({field: value}))}
        error = refusal("engine", tensors)
        assert (
            scalar if error is None else error.startswith((f"{field}: ", f"{field}.", f"{field}["))
        )


def test_what_is_no_input_is_bounded_too() -> None:
    with pytest.raises(RequestError, match=r"^request id: has 257 characters; at most 256"):
        serve("engine", {}, request_id="x" * 257)
    with pytest.raises(RequestError, match=r"^request parameters: has \d+ characters; at most"):
        decode_parameters(json.dumps({"a": "x" * limits.MAX_SAMPLING_CHARACTERS}))
    with pytest.raises(RequestError, match=r"^request parameters: has 65 fields; at most 64"):
        decode_parameters(json.dumps({f"k{i}": i for i in range(65)}))


def build(prompt: list[int], max_model_len: int = 2**20, **fields: Any) -> list[Request]:
    stream = fields.pop("stream", True)
    return make_factory(max_model_len).build(
        AddRequest(1, pack_token_ids(prompt), fields, stream=stream)
    )


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        (
            [9] * 20_000,
            {"n": 256},
            r"n: 256 sequences of a prompt of 20000 tokens make 5120000 prompt tokens; at",
        ),
        ([9], {"n": 256, "max_tokens": 16_385}, r"max_tokens: must be at most 16384 with n 256"),
        (
            [9],
            {"max_tokens": 12_484, "logprobs": 20, "stream": False},
            r"max_tokens: must be at most 12483 with n 1 and logprobs 20",
        ),
    ],
)
def test_products_are_bounded(prompt: list[int], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}"):
        build(prompt, **fields)


def test_what_nobody_asked_for_is_lowered_instead() -> None:
    assert build([9], n=256, max_tokens=None)[0].max_tokens == 16_384
    (whole,) = build([9], max_tokens=None, logprobs=20, stream=False)
    (streamed,) = build([9], max_tokens=None, logprobs=20)
    assert (whole.max_tokens, streamed.max_tokens) == (12_483, 2**20 - 1)


def test_the_prompt_is_not_repeated_without_end() -> None:
    prompt = "a" * (limits.MAX_PREFIX_BYTES // 256 + 1)
    ready = Ready(2**17, VOCAB, 10, 16, 144, 64, "")
    preprocess = Preprocessor(TOKENIZER, DEFAULTS, max_model_len=2**17, vocab_size=VOCAB)
    tensors = {"text_input": text(prompt), "num_return_sequences": np.array([256])}
    made = preprocess(parse_inputs(tensors, {}))
    with pytest.raises(RequestError, match=r"^exclude_input_in_output: the prompt before each of"):
        parse_engine_inputs(engine_tensors(made), {}, 0, ready)
