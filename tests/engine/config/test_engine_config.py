import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import SamplingParams
from engine.config.engine_config import EngineConfig
from engine.errors import ConfigError
from engine.validation import unsupported


def write(tmp_path: Path, **fields: object) -> Path:
    path = tmp_path / "engine.json"
    path.write_text(json.dumps(fields), encoding="utf-8")
    return path


def test_a_variable_overrides_the_file_under_whichever_name_it_sets_the_field(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, max_batch_size=8, mem_fraction_static=0.5, block_size=32)
    environ = {"TRIDENT_MAX_NUM_SEQS": "4", "TRIDENT_GPU_MEMORY_UTILIZATION": "0.7"}
    config = EngineConfig.load(path, environ)
    assert (config.max_num_seqs, config.gpu_memory_utilization) == (4, 0.7)
    assert config.block_size == 32
    assert EngineConfig.load(path, {"TRIDENT_BLOCK_SIZE": ""}).max_num_seqs == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "engine.json: is not valid JSON"),
        ("[]", "engine.json: must hold one JSON object"),
        ('{"block_size": 0}', "block_size: .*greater than or equal to 1"),
        ('{"blocksize": 8}', "blocksize: unknown field"),
        ('{"max_model_len": "8x"}', r"max_model_len: Input .* integer.* \(got '8x'\)"),
        ('{"max_model_len": "1.0001k"}', "max_model_len: Input .* integer"),
        ('{"max_model_len": "0k"}', "max_model_len: .*greater than or equal to 2"),
        ('{"max_model_len": "9999999999T"}', "max_model_len: .*less than 9223372036854775808"),
        ('{"seed": 18446744073709551616}', "seed: .*less than 9223372036854775808"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "engine.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        EngineConfig.load(path, {})
    with pytest.raises(ConfigError, match=r"other\.json: cannot be read"):
        EngineConfig.load(tmp_path / "other.json", {})


def test_variables_have_the_peers_names_too_and_the_own_one_wins() -> None:
    environ = {"TRIDENT_MAX_BATCH_SIZE": "3"}
    assert EngineConfig.overrides(environ) == {"max_num_seqs": "3"}
    environ["TRIDENT_MAX_NUM_SEQS"] = "5"
    assert EngineConfig.overrides(environ) == {"max_num_seqs": "5"}


@pytest.mark.parametrize("name", ["", "engine", "tokenizer", "a/b", "..", "a\n", "x" * 129])
def test_a_model_cannot_be_served_under_any_name(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^served_model_name: "):
        EngineConfig.parse({"served_model_name": name})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("MAX_NUM_QUEUED_REQ", "MAX_NUM_QUEUED_REQS"),
        ("MAX_QUEUED_TOKENS", "MAX_NUM_QUEUED_TOKENS"),
        ("REQUEST_TIMEOUT", "REQUEST_TIMEOUT_S"),
        ("MODELS", "MODEL"),
        ("BLOCKSIZE", "BLOCK_SIZE"),
    ],
)
def test_a_misspelt_variable_is_refused(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"^TRIDENT_{name}: .* did you mean TRIDENT_{meant}\?$"):
        EngineConfig.overrides({f"TRIDENT_{name}": "1"})


@pytest.mark.parametrize(
    ("fields", "chosen"),
    [
        ({"dtype": "half"}, {"dtype": "float16"}),
        ({"dtype": "float"}, {"dtype": "float32"}),
        ({"dtype": torch.bfloat16}, {"dtype": "bfloat16"}),
        ({"load_format": "safetensors"}, {"load_format": "auto"}),
        (
            {"model": Path("/models/a"), "tokenizer": Path("b")},
            {"model": "/models/a", "tokenizer": "b"},
        ),
        (
            {"pipeline_parallel_size": "1", "trust_remote_code": False},
            {},
        ),
        ({"max_model_len": "32k"}, {"max_model_len": 32_000}),
        ({"max_model_len": "32K"}, {"max_model_len": 32_768}),
        ({"max_num_batched_tokens": "25.6k"}, {"max_num_batched_tokens": 25_600}),
        ({"kv_cache_memory_bytes": " 2G"}, {"kv_cache_memory_bytes": 2 * 2**30}),
        ({"enable_lora": "false", "disable_log_stats": True, "revision": None}, {}),
        ({"task": "generate", "distributed_executor_backend": "mp"}, {}),
        ({"trust_remote_code": True}, {}),
        ({"max_model_len": -1}, {}),
        ({"max_model_len": "auto"}, {}),
        ({"hf_overrides": '{"a": [1]}'}, {"hf_overrides": {"a": [1]}}),
    ],
)
def test_what_vllm_calls_the_same_or_nothing(
    fields: dict[str, Any], chosen: dict[str, str]
) -> None:
    assert EngineConfig.parse(fields) == EngineConfig.parse(chosen)
    assert EngineConfig(**fields) == EngineConfig(**chosen)


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("pipeline_parallel_size", 2, ""),
        ("enable_lora", True, "; name an adapter as model"),
        ("data_parallel_size", 2, ""),
    ],
)
def test_what_is_not_offered_is_refused_by_name(
    tmp_path: Path, name: str, value: Any, instead: str
) -> None:
    message = f"^{name}: not supported by this version of Trident{instead}$"
    with pytest.raises(ConfigError, match=message):
        EngineConfig.parse({name: value})
    with pytest.raises(ConfigError, match=message):
        EngineConfig.load(write(tmp_path), {f"TRIDENT_{name.upper()}": str(value)})


def test_what_is_refused_says_what_does_the_same() -> None:
    with pytest.raises(ConfigError, match=r"^rope_scaling: .*; set rope_parameters in hf_override"):
        EngineConfig.parse({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})


def test_no_setting_is_refused_that_there_is() -> None:
    names = {name for field in EngineConfig.model_fields for name in EngineConfig.names(field)}
    assert not names & set(unsupported.SETTINGS)
    assert not set(SamplingParams.model_fields) & set(unsupported.PARAMETERS)


def test_variables_of_others_are_left_alone() -> None:
    others = [
        *("RUN_ID", "ADMIN_KEY", "ADMIN_KEY_FILE", "SSL_CERTFILE", "SSL_KEYFILE", "SSL_CA_CERTS"),
        # What Kubernetes sets for a service named trident.
        *("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "SERVICE_PORT_GRPC", "PORT"),
        *("PORT_8000_TCP", "PORT_8000_TCP_ADDR", "PORT_8000_TCP_PORT", "PORT_8000_TCP_PROTO"),
    ]
    assert EngineConfig.overrides({f"TRIDENT_{name}": "1" for name in others}) == {}
