"""A checkpoint may name ordinary text as end of a sequence: that ends no document in its middle."""

import json
import re
import shutil
from pathlib import Path

import pytest

from engine import LLM, SamplingParams
from engine.errors import RequestError
from engine.text.tokenizer import Tokenizer

_DEMO = Path("engine/demo/checkpoint")


def _ids(*texts: str) -> list[int]:
    tokenizer = Tokenizer.from_pretrained(_DEMO)
    found = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert all(len(ids) == 1 for ids in found)
    return [token_id for [token_id] in found]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("text ends") / "model"
    shutil.copytree(_DEMO, folder)
    path = folder / "generation_config.json"
    config = json.loads(path.read_text())
    config["eos_token_id"] = [2, *_ids("5", " the", ",")]
    path.write_text(json.dumps(config))
    return LLM(str(folder), dtype="float32", num_gpu_blocks_override=200)


_NAME = "on the other hand"
_DOCUMENT = {
    "type": "object",
    "properties": {_NAME: {"type": "integer", "minimum": 10_000, "maximum": 99_999}},
    "required": [_NAME],
    "additionalProperties": False,
}


@pytest.mark.parametrize("logprobs", [None, 1], ids=["forced", "sampled"])
@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"regex": "[0-9]{8}"}, r"[0-46-9]{8}"),
        ({"regex": "[ab] the cat and the hat"}, "[ab] the cat and the hat"),
        ({"choice": ["on the other hand"]}, "on the other hand"),
        ({"json": _DOCUMENT}, rf'\{{\s*"{_NAME}"\s*:\s*[0-46-9]{{5}}\s*\}}'),
    ],
)
def test_generate_text_that_is_an_end_token_does_not_end_a_grammar(
    llm: LLM, asked: dict[str, object], expected: str, logprobs: int | None
) -> None:
    fields = {"temperature": 1.0, "seed": 5, "max_tokens": 100, "logprobs": logprobs}
    bias = dict.fromkeys(_ids("5", " the", ","), 100.0)
    params = SamplingParams.parse({**fields, "structured_outputs": asked, "logit_bias": bias})
    [result] = llm.generate(["Say"], params, use_tqdm=False)
    [output] = result.outputs
    assert output.finish_reason == "stop"
    assert re.fullmatch(expected, output.text)


def test_generate_a_grammar_that_needs_an_end_token_fails(llm: LLM) -> None:
    """No other token has the comma."""
    bias = dict.fromkeys(_ids(","), 100.0)
    params = SamplingParams.parse(
        {"structured_outputs": {"regex": "a[bc],d"}, "logit_bias": bias, "temperature": 1.0}
    )
    with pytest.raises(RequestError, match="cannot be followed: no token is left"):
        llm.generate(["Say"], params, use_tqdm=False)
    llm.check_integrity()


def test_generate_an_end_token_ends_a_text_that_may_end(llm: LLM) -> None:
    [five] = _ids("5")
    fields = {"structured_outputs": {"regex": "[0-9]{3,}"}, "logit_bias": {five: 100.0}}
    params = SamplingParams.parse({**fields, "temperature": 1.0, "seed": 1, "max_tokens": 20})
    [result] = llm.generate(["Say"], params, use_tqdm=False)
    [output] = result.outputs
    assert (output.finish_reason, output.stop_reason) == ("stop", five)
    assert re.fullmatch("[0-46-9]{3}", output.text)
