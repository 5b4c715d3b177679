"""How the next tokens are guessed, in vLLM's fields."""

import json
from typing import Any

import pytest

from engine.config.engine_config import EngineConfig
from engine.config.speculative_config import SpeculativeConfig
from engine.errors import ConfigError

NGRAM = {"method": "ngram", "num_speculative_tokens": 5}


@pytest.mark.parametrize(
    ("fields", "least", "most"),
    [
        ({}, 2, 4),
        ({"prompt_lookup_max": 3}, 3, 3),
        ({"prompt_lookup_min": 6}, 6, 6),
        ({"prompt_lookup_min": 1, "prompt_lookup_max": 8}, 1, 8),
        ({"prompt_lookup_min": None, "prompt_lookup_max": None}, 2, 4),
    ],
)
def test_one_limit_stands_for_both(fields: dict[str, Any], least: int, most: int) -> None:
    given = {**NGRAM, **fields}
    for value in (given, json.dumps(given)):
        config = EngineConfig.parse({"speculative_config": value})
        found = config.speculative_config
        assert isinstance(found, SpeculativeConfig)
        assert found.num_speculative_tokens == 5
        assert found.lookup_lengths == (least, most)
        assert EngineConfig.parse(config.model_dump()) == config


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({**NGRAM, "method": "eagle"}, r"speculative_config\.method: .*'ngram'"),
        ({**NGRAM, "model": "org/draft"}, r"speculative_config\.model: unknown field"),
        ({**NGRAM, "num_speculative_tokens": 0}, r"speculative_config\.num_speculative_tokens: "),
        ({"method": "ngram"}, r"speculative_config\.num_speculative_tokens: Field required"),
        ({**NGRAM, "prompt_lookup_min": 3, "prompt_lookup_max": 2}, "prompt_lookup_min must be at"),
        ([1], r"speculative_config: must be a JSON object"),
        (
            {**NGRAM, "num_speculative_tokens": True},
            r"speculative_config\.num_speculative_tokens: ",
        ),
        ({**NGRAM, "prompt_lookup_max": 0}, r"speculative_config\.prompt_lookup_max: [^;]*$"),
        ("{", r"speculative_config: is not valid JSON"),
    ],
    ids=str,
)
def test_what_it_cannot_be_is_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^(speculative_config: )?{message}"):
        EngineConfig.parse({"speculative_config": value})


@pytest.mark.parametrize(
    "name", ["speculative_config", "hf_overrides", "override_generation_config"]
)
def test_null_turns_it_off(name: str) -> None:
    for value in ("null", None):
        assert EngineConfig.parse({name: value}) == EngineConfig()
