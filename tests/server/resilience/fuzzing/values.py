"""Invalid values, independent of the transport."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec

# The limit of docker/nginx.conf, which the stack of tritonserver is made for.
LARGEST_BODY = 8 * 2**20
OUT_OF_RANGE: tuple[tuple[str, str, Any], ...] = (
    *(("max_tokens", "INT32", v) for v in (0, -1, -(2**31), 2**31 - 1, 10**6)),
    *(("num_return_sequences", "INT32", v) for v in (0, -1, 257, 2**31 - 1)),
    *(("top_k", "INT32", v) for v in (-2, -(2**31))),
    *(("min_tokens", "INT32", v) for v in (-1, 2**31 - 1)),
    *(("end_id", "INT32", v) for v in (-2, 2**31 - 1)),
    *(("pad_id", "INT32", v) for v in (-1, -(2**31))),
    *(("temperature", "FP32", v) for v in (-1.0, -1e38)),
    *(("top_p", "FP32", v) for v in (1.5, 3e38)),
    *(("min_p", "FP32", v) for v in (-0.1, 2.0)),
    *(("repetition_penalty", "FP32", v) for v in (0.0, -1.0)),
    *(("presence_penalty", "FP32", v) for v in (-2.5, 1e30)),
    *(("beam_width", "INT32", v) for v in (0, -1, 65, 2**31 - 1)),
    ("lora_task_id", "UINT64", 2**64 - 1),
    ("timeout", "UINT64", 0),
    ("stop_words", "BYTES", ["x" * 5000]),
    ("stop_words", "BYTES", ["x"] * 1000),
    ("embedding_bias_words", "BYTES", ["a", "b"]),
    ("embedding_bias_weights", "FP32", [1.0, 2.0]),
    ("guided_decoding_guide_type", "BYTES", "regex"),  # which needs a guide
)
# Not included: "ensemble\\x00", which tritonserver reads up to the NUL.
MODEL_NAMES = (
    "bogus", "", "Ensemble", "../ensemble", "x" * 100_000, "ensemble/1", "%s%n",
    "模",
)  # fmt: skip
MODEL_VERSIONS = ("2", "abc", "99999999999999999999999", "0x1")

_FIELDS = (
    "n", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "max_tokens",
    "min_tokens", "stop", "stop_token_ids", "bad_words", "ignore_eos", "logprobs", "logit_bias",
    "allowed_token_ids", "skip_special_tokens", "presence_penalty", "frequency_penalty",
    "prompt_logprobs", "echo", "beam_width", "length_penalty", "early_stopping", "best_of",
    "top_n_sigma", "typical_p",
    "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
    "dry_sequence_breakers", "logits_processors",
)  # fmt: skip

_WRONG_TYPES: tuple[Any, ...] = ({"a": 1}, {"x": {}}, [[1]], [{}], [None], {"1": []})


def bad_sampling(rng: random.Random) -> str:
    """Return `sampling_parameters` that are not a JSON object, or have an invalid field."""
    depth = rng.choice([10, 1000, 100_000, LARGEST_BODY // 10])
    return rng.choice(
        [
            "[" * depth,
            "[" * depth + "]" * depth,
            '{"stop": ' + "[" * depth + "]" * depth + "}",
            '{"a":' * depth + "1" + "}" * depth,
            '{"seed": 9' + "9" * depth * 2 + "}",
            '{"temperature": 1e' + "9" * 9 + "}",
            '{"temperature": NaN}',
            '{"temperature": -Infinity}',
            '{"stop": "\\ud800"}',
            '{"max_tokens": 1' + "0" * 30 + "}",
            '{"' + "k" * depth + '": 1}',
            json.dumps({"logit_bias": {"-1": 1.0}}),
            json.dumps({"stop": ["x"] * 100_000}),
            json.dumps({"stop_token_ids": [rng.choice([-1, 2**31])]}),
            json.dumps({"allowed_token_ids": []}),
            "null", "1", '""', "{", "}", "{}{}", "\x00", "{'a': 1}", '{"n": 1,}',
            json.dumps({rng.choice(_FIELDS): rng.choice(_WRONG_TYPES)}),
            json.dumps({rng.choice(["bogus", "", "N", "__class__", "model_config"]): 1}),
        ]
    )  # fmt: skip


def bad_messages(rng: random.Random) -> str:
    """Return `messages` that are not a valid chat."""
    depth = rng.choice([10, 1000, 100_000, LARGEST_BODY // 10])
    return rng.choice(
        [
            "[" * depth,
            "[" * depth + "]" * depth,
            '[{"role":"user","content":' + "[" * depth + "]" * depth + "}]",
            "[]", "{}", "null", "1", '"x"', "[1]", "[null]", "[[]]", "[{}]", "\x00",
            '[{"role": "user"}]',
            '[{"content": "x"}]',
            '[{"role": 1, "content": "x"}]',
            '[{"role": "user", "content": 5}]',
            '[{"role": "banned", "content": "x"}]',
            '[{"role": "user", "content": "\\ud800"}]',
            json.dumps([{"role": "user", "content": "x"}] * 20_000),
            json.dumps([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]),
        ]
    )  # fmt: skip


def forged_detokenizer_input(rng: random.Random) -> bytes:
    """Return a well-formed message with odd values, after 40 bytes for its header."""
    number = [0, 1, -1, 2**31, 2**63 - 1, -(2**63), 2**64 - 1]
    ids = [rng.choice([0, 5, -1, 299, 10**6, 2**62]) for _ in range(rng.randint(0, 5))]
    text = rng.choice(["", "stop", "\x00", "x" * 10_000])
    chunk = [rng.choice([0, rng.choice(number)]), ids, ids, rng.choice([None, text])]
    chunk += [rng.choice(number), None, rng.choice([None, 1.5, float("nan")]), None, text]
    options = [rng.random() < 0.5, rng.choice(number), True, rng.choice([[], [text], ["logprobs"]])]
    message = [rng.choice(number), [chunk] * rng.choice([0, 1, 300]), *options]
    header = rng.randbytes(rng.choice([40, 40, 39, 0]))
    return header + msgspec.msgpack.encode(message[: rng.choice([len(message), 2, 3])])


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Flip, insert, delete, repeat or swap some bytes, or truncate."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5, 30])):
        offset = rng.randrange(len(changed)) if changed else 0
        match rng.randrange(6):
            case 0 if changed:
                changed[offset] ^= 1 << rng.randrange(8)
            case 1:
                changed[offset:offset] = rng.randbytes(rng.randint(1, 8))
            case 2:
                del changed[offset : offset + rng.randint(1, 8)]
            case 3:
                changed[offset:offset] = changed[offset : offset + rng.randint(1, 40)]
            case 4 if changed:
                changed[offset] = rng.choice([0, 0x7F, 0x80, 0xFF])
            case _:
                del changed[len(changed) - rng.randint(0, 20) :]
    return bytes(changed)
