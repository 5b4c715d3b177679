"""EngineConfig: every setting of Trident, validated once and frozen.

`model_repository/engine/1/engine.json` is this object as JSON; an environment variable
`TRIDENT_<FIELD>` overrides a field of it, and a flag of `trident serve` sets that variable.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from engine.config import null_device
from engine.config.setting_types import (
    Device,
    Dtype,
    Integer,
    JsonObject,
    KVCacheDtype,
    Length,
    LoadFormat,
    Model,
    PathText,
    QuantizationSetting,
    ReasoningParser,
    ServedModelName,
    Speculative,
    TenantKey,
    ToolCallParser,
)
from engine.errors import ConfigError
from engine.json_reader import parse_json
from engine.text.output_parsing.tags import AUTO, REASONING, TOOL_CALLS
from engine.validation import unsupported
from engine.validation.checks import error_of

ENV_PREFIX = "TRIDENT_"

_ALIASES = {"half": "float16", "float": "float32", "safetensors": "auto"}  # vLLM's, of values


class EngineConfig(BaseModel):
    """Settings of the engine, in vLLM's names. Immutable; wrong values raise `ValueError`.

    Fields whose default is None are derived when the device and the model are known (see
    `engine.execution.devices` and `engine.execution.memory.kv_cache_plan`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    model: Model = Field("demo", description="checkpoint folder, GGUF file, hub id, or `demo`")
    tokenizer: PathText | None = Field(
        None, description="tokenizer folder or hub id; default: the model's"
    )
    served_model_name: ServedModelName | None = Field(
        None, description="model name that clients put into requests; default: ensemble"
    )
    load_format: LoadFormat = Field(
        "auto",
        description="auto: load the checkpoint's safetensors; dummy: random weights made from seed",
    )
    hf_overrides: JsonObject = Field(
        None,
        description="JSON object whose fields override those of config.json, for example "
        "rope_parameters",
        validation_alias=AliasChoices("hf_overrides", "json_model_override_args"),
    )
    generation_config: Literal["auto", "vllm"] = Field(
        "auto",
        description="default sampling parameters; auto: those of the checkpoint's "
        "generation_config.json; vllm: those of vLLM",
    )
    override_generation_config: JsonObject = Field(
        None,
        description="JSON object whose fields override those of generation_config.json, for "
        "example temperature",
    )
    dtype: Dtype = Field(
        "auto", description="dtype of the computation; auto: the checkpoint's dtype"
    )
    quantization: QuantizationSetting | None = Field(
        None,
        description="quantise weights while loading (and activations to 8 bits): int8 or int4 on "
        "CPUs, fp8 on GPUs; a quantised checkpoint is recognised without this setting",
    )
    device: Device = Field(
        "auto",
        description="auto: cuda if there is a GPU, otherwise cpu; cpu; cuda; null or null:MS, for "
        "benchmarks: no model is computed, tokens are made up, and a step takes MS milliseconds",
    )
    tensor_parallel_size: Annotated[Integer, Field(ge=1, le=16)] = Field(
        1,
        description="processes that compute the model together, each a part of every layer, with a "
        "GPU of its own or a share of the CPU's cores",
    )
    enable_expert_parallel: bool = Field(
        False,
        description="with tensor_parallel_size: each process has whole experts of a mixture, not a "
        "part of every expert",
    )
    seed: Annotated[Integer, Field(ge=0)] = Field(
        0, description="random seed of requests without one, and of dummy weights"
    )
    max_model_len: Length = Field(
        None,
        description="limit of prompt and output tokens together; default: the model's context "
        "length, or what fits into the KV cache",
    )
    max_num_seqs: Annotated[Integer, Field(ge=1)] | None = Field(
        None,
        description="limit of sequences running at once; default: 64 on a CPU, 256 on a GPU",
        validation_alias=AliasChoices("max_num_seqs", "max_batch_size"),
    )
    max_num_batched_tokens: Annotated[Integer, Field(ge=1)] | None = Field(
        None,
        description="token budget of one step, prefill and decode together; default: 2048, or 8192 "
        "on GPUs from Hopper on with 80 GB",
    )
    enable_chunked_prefill: bool = Field(True, description="split prompts over several steps")
    long_prefill_token_threshold: Annotated[Integer, Field(ge=0)] = Field(
        0,
        description="limit of prompt tokens of one request in a step; 0: max_num_batched_tokens "
        "alone limits them",
    )
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        "fcfs",
        description="order in which waiting requests run; fcfs: first come, first served; "
        "priority: lowest `priority` first",
    )
    min_priority: Annotated[Integer, Field(ge=-(2**31), le=0)] | None = Field(
        None, description="smallest `priority` that a request may have; default: any"
    )
    max_num_queued_reqs: Annotated[Integer, Field(ge=1)] = Field(
        4096, description="limit of waiting sequences; requests above it are rejected at once"
    )
    max_num_queued_tokens: Annotated[Integer, Field(ge=1)] | None = Field(
        None,
        description="limit of waiting prompt tokens; default: max_num_queued_reqs times the tokens "
        "of the KV cache per running sequence (of max_num_seqs), at most 4 million",
    )
    tenant_key: TenantKey | None = Field(
        None,
        repr=False,
        description="secret that lets a gateway set the `tenant` of a request; requests without it "
        "share one tenant",
    )
    request_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="time limit of a request in seconds, from its arrival; default: none"
    )
    deterministic: bool = Field(
        False,
        description="the same request gets the same tokens and log-probabilities, to the last bit, "
        "whatever else runs",
    )
    enforce_eager: bool = Field(False, description="run without CUDA graphs (on a GPU)")
    async_scheduling: bool | None = Field(
        None,
        description="launch each step before the tokens of the previous one are read; default: on "
        "for a GPU",
    )
    block_size: Annotated[Integer, Field(ge=1, le=256)] = Field(
        16, description="tokens per KV block"
    )
    kv_cache_dtype: KVCacheDtype = Field(
        "auto",
        description="dtype of the KV cache; auto: that of the computation; fp8 (an alias of "
        "fp8_e4m3): one byte per value, on GPUs only",
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        0.9,
        description="share of GPU memory for weights, activations and KV cache",
        validation_alias=AliasChoices(
            "gpu_memory_utilization", "kv_cache_free_gpu_mem_fraction", "mem_fraction_static"
        ),
    )
    kv_cache_memory_bytes: Annotated[Integer, Field(ge=1)] | None = Field(
        None, description="KV cache size in bytes; default: computed from the free memory"
    )
    num_gpu_blocks_override: Annotated[Integer, Field(ge=2)] | None = Field(
        None, description="number of KV blocks, in place of the number that the memory allows"
    )
    swap_space: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        0,
        description="GiB of host memory for the KV of preempted sequences; 0: recompute their KV",
    )
    enable_prefix_caching: bool = Field(
        True, description="share the KV blocks of equal prompt prefixes"
    )
    max_logprobs: Annotated[Integer, Field(ge=0)] = Field(
        20, description="largest `logprobs` that a request may ask for"
    )
    chat_template: PathText | None = Field(
        None,
        description="chat template in place of the checkpoint's: a Jinja file, or the template's "
        "text",
    )
    reasoning_parser: ReasoningParser = Field(
        AUTO,
        description="whose tags delimit reasoning; auto: those of the chat template; none; or one "
        f"of {', '.join(REASONING)}",
    )
    tool_call_parser: ToolCallParser = Field(
        AUTO, description=f"the same of tool calls; one of {', '.join(TOOL_CALLS)}"
    )
    stream_interval: Annotated[Integer, Field(ge=1)] = Field(
        1, description="tokens per streamed chunk"
    )
    speculative_config: Speculative = Field(
        None,
        description="speculative decoding, on a CPU only, as JSON with vLLM's fields: "
        '{"method": "ngram", "num_speculative_tokens": 5}',
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="format of Trident's own log lines; json: one object per line"
    )
    heartbeat_timeout_s: Annotated[float, Field(ge=2)] = Field(
        10.0,
        description="seconds without a heartbeat of the engine process after which it counts as "
        "hung and is restarted",
    )
    step_timeout_s: Annotated[float, Field(gt=0)] = Field(
        300.0,
        description="seconds for one step and the messages handled before it, after which the "
        "engine process counts as hung and is restarted",
    )

    @model_validator(mode="before")
    @classmethod
    def _of_other_servers(cls, fields: Any) -> Any:
        return unsupported.without(fields, unsupported.SETTINGS) if type(fields) is dict else fields

    @field_validator("dtype", "load_format", mode="before")
    @classmethod
    def _same_as(cls, value: Any) -> Any:
        name = str(value).removeprefix("torch.")  # that of a torch.dtype too
        return _ALIASES.get(name, name)

    @model_validator(mode="after")
    def _consistent(self) -> EngineConfig:
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if seqs is not None and tokens is not None and tokens < seqs:
            raise ConfigError(
                "must be at least max_num_seqs, so that every running "
                f"sequence can advance in a step ({tokens} < {seqs})",
                param="max_num_batched_tokens",
            )
        if self.long_prefill_token_threshold and not self.enable_chunked_prefill:
            raise ConfigError(
                "needs enable_chunked_prefill; set that to true, or this to 0",
                param="long_prefill_token_threshold",
            )
        return self

    @property
    def null_step_s(self) -> float | None:
        """Seconds that a step of the null device takes; None if it is another device."""
        return null_device.step_s(self.device)

    @property
    def reads_weights(self) -> bool:
        """Whether the weights of the checkpoint are needed."""
        return self.load_format != "dummy" and self.null_step_s is None

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> EngineConfig:
        """Build from untrusted fields; raises `ConfigError` naming the setting."""
        try:
            return cls.model_validate(dict(fields))
        except ValidationError as error:
            raise error_of(error, ConfigError) from None

    @classmethod
    def load(cls, path: Path, environ: Mapping[str, str] = os.environ) -> EngineConfig:
        """Read `engine.json` at `path`, overridden by the `TRIDENT_*` variables of `environ`.

        Raises:
            ConfigError: the file is missing or no JSON object, a value is wrong, or a variable is
                misspelt.
        """
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot be read: {error.strerror}", param=path.name) from None
        fields = parse_json(content, "", partial(ConfigError, param=path.name))
        if not isinstance(fields, dict):
            raise ConfigError("must hold one JSON object", param=path.name)
        overrides = cls.overrides(environ)
        overridden = {alias for name in overrides for alias in cls.names(name)}
        kept = {name: value for name, value in fields.items() if name not in overridden}
        return cls.parse({**kept, **overrides})

    @classmethod
    def names(cls, field: str) -> tuple[str, ...]:
        """Return the names by which `field` may be set: its own, then its aliases."""
        known = cls.model_fields.get(field)  # None: a setting of vLLM that Trident does not have
        alias = known and known.validation_alias
        return tuple(map(str, alias.choices)) if isinstance(alias, AliasChoices) else (field,)

    @classmethod
    def overrides(cls, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the settings that `TRIDENT_<FIELD>` variables give; an empty one is unset.

        Variables that resemble no setting are ignored: Kubernetes sets `TRIDENT_PORT` and similar
        ones for a service that is named trident.

        Raises:
            ConfigError: a variable is a misspelt setting, which would otherwise have no effect.
        """
        given = {
            name.removeprefix(ENV_PREFIX).lower(): value
            for name, value in environ.items()
            if name.startswith(ENV_PREFIX) and value
        }
        names = {field: cls.names(field) for field in (*cls.model_fields, *unsupported.SETTINGS)}
        known = [name for aliases in names.values() for name in aliases]
        for name in given.keys() - set(known):
            if similar := get_close_matches(name, known, n=1, cutoff=0.85):
                raise ConfigError(
                    f"there is no such setting; did you mean {ENV_PREFIX}{similar[0].upper()}?",
                    param=f"{ENV_PREFIX}{name.upper()}",
                )
        return {
            field: next(given[name] for name in aliases if name in given)
            for field, aliases in names.items()
            if given.keys() & set(aliases)
        }
