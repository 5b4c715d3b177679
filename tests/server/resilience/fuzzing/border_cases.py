"""Valid requests at the borders of what each field allows, several fields at once."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

from tritonclient.grpc.service_pb2 import ModelInferRequest as Message

from tests.server.resilience.fuzzing import grammars, valid
from tests.server.resilience.fuzzing.case import Case

MAX_MODEL_LEN = 512  # of the servers under test
_NUM_IDS = 256  # ids that every vocabulary here has
_MAX_TOKENS = 24

Fields = Mapping[str, Any]


def _one_token(rng: random.Random) -> Fields:
    return {"max_tokens": 1, "min_tokens": rng.randrange(2)}


def _no_stop_before_the_end(rng: random.Random) -> Fields:
    length = rng.randint(1, _MAX_TOKENS)
    ids = rng.sample(range(_NUM_IDS), rng.choice([1, 16, 17, _NUM_IDS]))
    return {"min_tokens": length, "max_tokens": length, "stop_token_ids": ids}


def _many_stops(rng: random.Random) -> Fields:
    words = ["".join(rng.choices("ab 你e", k=32)) for _ in range(256)]
    return {"stop": words, "include_stop_str_in_output": rng.random() < 0.5}


def _nested_stops(rng: random.Random) -> Fields:
    start = rng.choice("aeo é你")
    return {"stop": [start * length for length in range(rng.randint(1, 3), 120)]}


def _stops_of_one_character(rng: random.Random) -> Fields:
    return {"stop": list(map(chr, range(1, 257))), "min_tokens": rng.randrange(9)}


def _bias(rng: random.Random) -> Fields:
    extremes = [100.0, -100.0, 5e-324, -0.0]
    ids = rng.sample(range(_NUM_IDS), rng.choice([1, 60, _NUM_IDS]))
    value = rng.choice([None, *extremes])
    return {"logit_bias": {i: rng.choice(extremes) if value is None else value for i in ids}}


def _seed(rng: random.Random) -> Fields:
    seed = rng.choice([0, 1, 2**31 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
    return {"seed": seed, "temperature": 1.0}


def _nothing_allowed_is_left(rng: random.Random) -> Fields:
    return {
        "allowed_token_ids": rng.sample(range(_NUM_IDS), rng.choice([1, 2, 100])),
        "bad_words": list(map(chr, range(1, 257))),
    }


def _filters(rng: random.Random) -> Fields:
    return {
        "temperature": rng.choice([5e-324, 1e-45, 1e-37, 1e37, 1e308]),
        "top_k": rng.choice([1, 2, 2**31 - 1]),
        "top_p": rng.choice([5e-324, 1e-9, 1.0]),
        "min_p": rng.choice([0.0, 5e-324, 1.0]),
        "top_n_sigma": rng.choice([-1, 0.0, 5e-324, 1e308]),
        "typical_p": rng.choice([5e-324, 0.5, 1.0]),
    }


def _dry(rng: random.Random) -> Fields:
    return {
        "dry_multiplier": rng.choice([5e-324, 1.0, 1e308]),
        "dry_base": rng.choice([1.0, 1.75, 1e308]),
        "dry_allowed_length": rng.choice([0, 1, 2**31 - 1]),
        "dry_penalty_last_n": rng.choice([-1, 0, 1, 2**31 - 1]),
        "dry_sequence_breakers": rng.choice([[], ["a"], ["\x00", "\ufffd" * 40], ["\n"] * 32]),
    }


def _penalties(rng: random.Random) -> Fields:
    return {
        "repetition_penalty": rng.choice([5e-324, 1e-38, 1e38, 1e308]),
        "presence_penalty": rng.choice([-2.0, 2.0]),
        "frequency_penalty": rng.choice([-2.0, 2.0]),
    }


def _logprobs(rng: random.Random) -> Fields:
    return {"logprobs": rng.choice([0, 1, 20])}


def _prompt_logprobs(rng: random.Random) -> Fields:
    return {"prompt_logprobs": rng.choice([0, 1, 20]), "max_tokens": rng.choice([0, 1, 4])}


def _grammar(rng: random.Random) -> Fields:
    return grammars.right(rng)


def _mutated_grammar(rng: random.Random) -> Fields:
    return grammars.mutated(rng)


_BORDERS: tuple[Callable[[random.Random], Fields], ...] = (
    _one_token,
    _no_stop_before_the_end,
    _many_stops,
    _nested_stops,
    _stops_of_one_character,
    _bias,
    _seed,
    _nothing_allowed_is_left,
    _filters,
    _dry,
    _penalties,
    _logprobs,
    _prompt_logprobs,
    _grammar,
    _mutated_grammar,
)


def make(rng: random.Random) -> Case:
    """Return a request that is valid; siblings may be too many for the queue."""
    border = rng.choice(_BORDERS)
    fields: dict[str, Any] = {"max_tokens": _MAX_TOKENS}
    for each in (*rng.sample(_BORDERS, rng.randrange(3)), border):
        fields.update(each(rng))
    fields["min_tokens"] = min(fields.get("min_tokens", 0), fields["max_tokens"])
    kind = border.__name__.strip("_").replace("_", " ")
    if has_siblings := rng.random() < 0.25:
        fields["n"] = rng.choice([2, 3, 8])
    message, cancel_after = Message(), None
    if rng.random() < 0.2:  # the last token that there is room for
        fields["max_tokens"], fields["min_tokens"] = rng.choice([1, None]), 0
        message = _to_engine(rng, MAX_MODEL_LEN - 1)
    elif rng.random() < 0.5:
        message = _to_engine(rng, rng.choice([1, 15, 16, 17, 200]))
    else:
        message = Message(model_name="ensemble")
        valid.add(message, "text_input", "BYTES", rng.choice(["a", "你好", "Some text " * 9]))
        valid.add(message, "max_tokens", "INT32", fields["max_tokens"])
        valid.add(message, "stream", "BOOL", True)
    if rng.random() < 0.25:
        cancel_after = rng.randint(1, 3)
    valid.add(message, "sampling_parameters", "BYTES", json.dumps(fields))
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    return Case(
        f"border: {kind}",
        "stream",
        message.SerializeToString(),
        must_fail=False,
        # Other fields may forbid what a grammar demands.
        must_succeed=not has_siblings and "structured_outputs" not in fields,
        cancel_after=cancel_after,
    )


def _to_engine(rng: random.Random, num_tokens: int) -> Message:
    message = Message(model_name="engine")
    ids = [rng.randrange(_NUM_IDS) for _ in range(num_tokens)]
    valid.add(message, "input_ids", "INT32", ids)
    valid.add(message, "stream", "BOOL", rng.random() < 0.7)
    return message
