"""Samplers and logits processors through the ensemble's inputs, bad ones among them."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import pytest

from engine.launch.server import TritonServer
from tests.server.caller import Caller, InferError

pytestmark = pytest.mark.server

ASK = {"text_input": "one two one two one", "max_tokens": 40, "temperature": 1.0, "seed": 4}


def ids(caller: Caller, fields: dict[str, Any], **inputs: Any) -> list[int]:
    """Return the tokens that `engine` samples after the prompt 5, 6, 7."""
    every = {"max_tokens": 12, "ignore_eos": True, "temperature": 1.0, "seed": 4, **fields}
    response = caller.one(
        "engine", input_ids=[5, 6, 7], sampling_parameters=json.dumps(every), **inputs
    )
    return list(response["token_ids"])


def text(caller: Caller, fields: dict[str, Any]) -> str:
    response = caller.one(
        **ASK, exclude_input_in_output=True, sampling_parameters=json.dumps(fields)
    )
    return str(response["text_output"][0])


@pytest.mark.parametrize(
    "fields",
    [
        {"typical_p": 0.3},
        {"top_n_sigma": 1.0},
        {"dry_multiplier": 5.0, "dry_allowed_length": 1, "dry_sequence_breakers": []},
    ],
    ids=str,
)
def test_each_sampler_changes_the_answer_and_keeps_the_seed(
    caller: Caller, fields: dict[str, Any]
) -> None:
    few = {"ignore_eos": True, "allowed_token_ids": [*range(70, 80)]}  # so that they come again
    found = text(caller, {**few, **fields})
    assert found == text(caller, {**few, **fields})
    assert found != text(caller, few)
    assert len(found) >= 10


def test_few_sigmas_are_greedy(caller: Caller) -> None:
    greedy = ids(caller, {"temperature": 0})
    assert ids(caller, {"top_n_sigma": 1e-6}) == greedy
    assert ids(caller, {"top_n_sigma": -1, "typical_p": 1.0}) == ids(caller, {})


def test_a_processor_of_a_package(caller: Caller, server: TritonServer) -> None:
    asked = [{"name": "counting", "args": {"first": 100}}]
    assert ids(caller, {"logits_processors": asked}) == [*range(100, 112)]
    asked = [{"name": "counting", "args": {"first": 100, "dense": True}}]
    assert ids(caller, {"logits_processors": asked}) == [*range(100, 112)]
    assert "logits processor 'counting' (tests.factories.processors:Counting" in server.log


def test_a_fault_ends_its_request_alone(caller: Caller, server: TritonServer) -> None:
    before = len(server.log)
    alone = ids(caller, {"max_tokens": 200})
    others: list[list[int]] = []

    def run() -> None:
        other = Caller(server.grpc_url, server.http_url)
        others.append(ids(other, {"max_tokens": 200}))
        other.close()

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for fault in ("raise", "nan", "shape"):
        args = {"first": 5, "fail": fault, "at": 3}
        with pytest.raises(
            InferError, match=r"logits_processors\.counting: the processor failed: "
        ):
            ids(caller, {"logits_processors": [{"name": "counting", "args": args}], "n": 1})
    for thread in threads:
        thread.join()
    assert others == [alone] * 3
    assert "RuntimeError: the processor is broken" in server.log[before:]


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"typical_p": 0}, "typical_p: .*greater than 0"),
        ({"typical_p": 2}, "typical_p: .*less than or equal to 1"),
        ({"top_n_sigma": -3}, "top_n_sigma: .*greater than or equal to 0"),
        ({"dry_multiplier": -1}, "dry_multiplier: "),
        ({"dry_base": 0.5}, "dry_base: .*greater than or equal to 1"),
        ({"dry_allowed_length": -1}, "dry_allowed_length: "),
        ({"dry_penalty_last_n": -2}, "dry_penalty_last_n: "),
        ({"dry_sequence_breakers": ["x" * 41]}, r"dry_sequence_breakers\[0\]: .*at most 40"),
        ({"dry_sequence_breakers": ["x"] * 33}, "dry_sequence_breakers: must have at most 32"),
        ({"dry_sequence_breakers": 3}, "dry_sequence_breakers: "),
        (
            {"logits_processors": ["none"]},
            r"logits_processors\[0\].name: there is no logits processor",
        ),
        (
            {"logits_processors": [{"name": "counting", "args": {"first": -1}}]},
            r"logits_processors\[0\].args: first: must be 0 to \d+ \(got -1\)",
        ),
        (
            {"logits_processors": [{"name": "counting", "args": [1]}]},
            r"logits_processors\[0\].args: ",
        ),
        ({"logits_processors": {"name": "counting"}}, "logits_processors: "),
        ({"logit_bias": {"5": 101}}, "logit_bias.5: .*less than or equal to 100"),
        ({"logit_bias": {"5": -1e9}}, "logit_bias.5: .*greater than or equal to -100"),
        ({"logit_bias": {"99999": 1}}, "logit_bias: token id 99999 is outside the vocabulary"),
        ({"bad_words": ["x"] * 257}, "bad_words: must have at most 256"),
        ({"bad_words": ["x" * 1025]}, r"bad_words\[0\]: .*at most 1024"),
    ],
    ids=str,
)
def test_bad_input_is_named(caller: Caller, fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(InferError) as error:
        text(caller, fields)
    assert re.search(fault, str(error.value))
