"""`/v1/embeddings`, and the same by plain tritonclient, our own client and the offline API."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from client import TridentClient
from client.gateway.openai.serving_embeddings import MAX_INPUTS
from engine import LLM
from engine.launch.server import TritonServer
from tests.server.caller import Caller
from tests.server.conftest import MAX_MODEL_LEN
from tests.server.gateway.conftest import MODEL

pytestmark = pytest.mark.server

TEXTS = ["One two", "Where is it? 你好 😀", "x" * 300]
ATOL = 2e-6


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Any:
    llm = LLM(str(checkpoint), dtype="float32", device="cpu", num_gpu_blocks_override=200)
    return llm.embed(TEXTS, use_tqdm=False)


def values(found: Any) -> list[list[float]]:
    return [each.embedding for each in found.data]


def test_texts_and_token_ids(openai: OpenAI, expected: Any) -> None:
    vectors = [each.outputs.embedding for each in expected]
    ids = [each.prompt_token_ids for each in expected]
    for given in (TEXTS, ids):
        for form in ("float", "base64"):
            found = openai.embeddings.create(model=MODEL, input=given, encoding_format=form)
            got = [_decoded(each) for each in values(found)]
            np.testing.assert_allclose(got, vectors, atol=ATOL)
            assert [each.index for each in found.data] == [0, 1, 2]
            assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, ids))
            assert found.model == MODEL
    for one in (TEXTS[1], ids[1]):
        [got] = values(openai.embeddings.create(model="alias", input=one))
        np.testing.assert_allclose(got, vectors[1], atol=ATOL)


def _decoded(value: Any) -> Any:
    # The client decodes base64 only if nobody has asked for a form.
    return np.frombuffer(base64.b64decode(value), "<f4") if isinstance(value, str) else value


def test_fewer_dimensions_have_the_length_1_too(openai: OpenAI, expected: Any) -> None:
    [short] = values(openai.embeddings.create(model=MODEL, input=TEXTS[0], dimensions=5))
    begin = np.array(expected[0].outputs.embedding[:5])
    np.testing.assert_allclose(short, begin / np.linalg.norm(begin), atol=ATOL)


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"input": []}, "input", f"input: must have 1 to {MAX_INPUTS} elements, not 0"),
        (
            {"input": ["a"] * (MAX_INPUTS + 1)},
            "input",
            f"input: must have 1 to {MAX_INPUTS} elements",
        ),
        ({"input": ""}, "input", "input: must not be empty"),
        ({"input": ["a", ""]}, "input[1]", "input[1]: must not be empty"),
        ({"input": ["a", "x" * 600]}, "input[1]", "input[1]: the prompt has "),
        ({"input": ["a", "x" * 100_000]}, "input[1]", "input[1]: "),
        ({"input": ["a", 5]}, "input[1]", "must be a string, a list of strings"),
        ({"input": [[1], [2, 400_000]]}, "input[1][1]", "input[1][1]: token id 400000 is outside"),
        ({"input": [400_000]}, "input[0]", "input[0]: token id 400000 is outside"),
        ({"input": [[1, 2**31]]}, "input[0][1]", "input[0][1]: must be a 32-bit integer"),
        ({"input": "x" * 600}, "input", f"max_model_len is {MAX_MODEL_LEN}"),
        ({"input": "a", "dimensions": 65}, "dimensions", "dimensions: must be at most 64"),
        ({"input": "a", "dimensions": 0}, "dimensions", "dimensions: "),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "encoding_format: "),
        ({"input": "a", "extra_body": {"stream": True}}, "stream", "stream: unknown field"),
    ],
)
def test_what_is_wrong_is_refused_by_name(
    openai: OpenAI, fields: dict[str, Any], param: str, text: str
) -> None:
    with pytest.raises(BadRequestError) as caught:
        openai.embeddings.create(model=MODEL, **fields)
    assert text in caught.value.message
    assert caught.value.param == param


def test_a_longer_text_is_cut_to_its_end_if_it_shall_be(openai: OpenAI) -> None:
    for most, text in ((2, "xx"), (-1, "x" * (MAX_MODEL_LEN - 1))):
        cut: Any = {"truncate_prompt_tokens": most}
        found = openai.embeddings.create(model=MODEL, input=["x" * 600], extra_body=cut)
        assert found.usage.prompt_tokens <= len(text)
    ids = list(range(30, 60))
    cut = {"truncate_prompt_tokens": 4}
    [found], [same] = (
        values(openai.embeddings.create(model=MODEL, input=given, extra_body=more))
        for given, more in (([ids], cut), ([ids[-4:]], {}))
    )
    np.testing.assert_allclose(found, same, atol=ATOL)


def test_another_model_is_not_found(openai: OpenAI) -> None:
    with pytest.raises(NotFoundError):
        openai.embeddings.create(model="other", input="a")


def test_many_at_once(openai: OpenAI) -> None:
    texts = [f"text {number}" for number in range(500)]
    found = np.array(values(openai.embeddings.create(model=MODEL, input=texts)))
    [one] = values(openai.embeddings.create(model=MODEL, input=texts[321]))
    np.testing.assert_allclose(found[321], one, atol=ATOL)
    assert len(np.unique(found.round(3), axis=0)) > 400


def test_by_tritonclient(server: TritonServer, caller: Caller, expected: Any) -> None:
    sampling = json.dumps({"return_embedding": True})
    vector = expected[0].outputs.embedding
    found = caller.one(text_input=TEXTS[0], sampling_parameters=sampling)
    np.testing.assert_allclose(found["embedding"], vector, atol=ATOL)
    assert found["text_output"] == [""]
    ids = expected[0].prompt_token_ids
    direct = caller.one("engine", input_ids=ids, sampling_parameters=sampling)
    np.testing.assert_allclose(direct["embedding"], vector, atol=ATOL)
    streamed = list(caller.stream(text_input=TEXTS[0], stream=True, sampling_parameters=sampling))
    assert [len(each["embedding"]) for each in streamed] == [64]
    assert "embedding" not in caller.one(text_input=TEXTS[0])
    with TridentClient(server.grpc_url) as client:
        answer = client.generate(TEXTS[0], return_embedding=True)
        np.testing.assert_allclose(answer.embedding, vector, atol=ATOL)
        assert (answer.text, answer.num_output_tokens) == ("", 0)
        assert client.generate(TEXTS[0], max_tokens=1).embedding is None
