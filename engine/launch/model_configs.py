"""The model configurations of the repository, in both formats, written from one table of tensors.

`python -m engine.launch.model_configs` writes them; a test fails when that has been forgotten. In
the default form tensors have a batch dimension, as TensorRT-LLM's clients send them; in the form
`vllm` they have none (`--model-config-name=vllm`), and types and shapes are vllm_backend's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

ENSEMBLE = "ensemble"  # its folder in the repository, and its name by default
UNARY = "tensorrt_llm_bls"  # the model that answers plain infer()
REPOSITORY = Path(__file__).parents[2] / "model_repository"


@dataclass(frozen=True)
class ConfigFormat:
    """One of the formats of model configurations that the repository has."""

    file: str  # in the folder of each model
    max_batch_size: int


CONFIG_FORMATS = (ConfigFormat("config.pbtxt", 1), VLLM := ConfigFormat("configs/vllm.pbtxt", 0))


@dataclass(frozen=True)
class Tensor:
    """An input or output; `dims` without the batch dimension, -1 for any size."""

    name: str
    type: str
    dims: int | tuple[int, ...] = 1
    optional: bool = False

    def line(self) -> str:
        """Return its entry in a configuration."""
        dims = self.dims if isinstance(self.dims, tuple) else (self.dims,)
        sizes = ", ".join(map(str, dims))
        text = f'name: "{self.name}" data_type: TYPE_{self.type} dims: [ {sizes} ]'
        return f"  {{ {text}{' optional: true' if self.optional else ''} }}"


def _optional(type_: str, *names: str, dims: int | tuple[int, ...] = 1) -> list[Tensor]:
    return [Tensor(name, type_, dims, optional=True) for name in names]


# What TensorRT-LLM's ensemble and engine both take, and Trident does not: it is refused by
# `engine.service.sampling_inputs`.
_REFUSED_TENSORRT_LLM = [
    *_optional("UINT64", "lora_task_id"),
    *_optional("FP16", "lora_weights", "prompt_embedding_table", dims=(-1, -1)),
    *_optional("INT32", "lora_config", dims=(-1, 3)),
    *_optional("INT32", "prompt_vocab_size"),
]
# What TensorRT-LLM's engine names otherwise than its ensemble.
_ENGINE_NAMES = [
    *_optional("INT32", "request_output_len", "runtime_top_k"),
    *_optional("FP32", "runtime_top_p", "len_penalty", "beam_search_diversity_rate"),
    *_optional("BOOL", "streaming", "return_kv_cache_reuse_stats"),
]

# The inputs of the ensemble. Each costs tritonserver 2 us per request, sent or not; so
# it has those that clients send to an ensemble or to vllm_backend's model.
REQUEST = [
    *_optional("STRING", "text_input", "messages", "chat_parameters"),
    *_optional("INT32", "input_ids", dims=-1),
    *_optional("INT32", "max_tokens"),
    *_optional("BOOL", "stream", "exclude_input_in_output"),
    *_optional("STRING", "sampling_parameters"),
    *_optional("INT32", "num_return_sequences", "beam_width"),
    *_optional("FP32", "temperature"),
    *_optional("INT32", "top_k"),
    *_optional("FP32", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *_optional("FP32", "frequency_penalty", "length_penalty"),
    *_optional("BOOL", "early_stopping"),
    *_optional("INT32", "min_tokens", "min_length"),
    *_optional("UINT64", "seed", "random_seed"),
    *_optional("STRING", "stop_words", "bad_words", dims=-1),
    *_optional("INT32", "end_id", "pad_id"),
    *_optional("STRING", "embedding_bias_words", dims=-1),
    *_optional("FP32", "embedding_bias_weights", dims=-1),
    *_optional("BOOL", "return_log_probs", "return_num_input_tokens", "return_num_output_tokens"),
    *_optional("BOOL", "return_num_cached_tokens", "return_finish_reason", "return_perf_metrics"),
    *_optional("BOOL", "return_cumulative_logprob", "return_logprobs", "return_sections"),
    *_optional("BOOL", "return_stop_reason"),
    *_optional("BOOL", "return_context_logits", "return_generation_logits"),
    *_optional("STRING", "guided_decoding_guide_type", "guided_decoding_guide"),
    *_optional("STRING", "embedding_request"),
    *_optional("INT32", "priority"),
    *_optional("UINT64", "timeout"),
    *_optional("BOOL", "stop"),
    # Of TensorRT-LLM's LLM API.
    *_optional("INT32", "sampling_param_max_tokens", "sampling_param_top_k"),
    *_optional("INT32", "sampling_param_best_of"),
    *_optional("FP32", "sampling_param_temperature", "sampling_param_top_p"),
    *_optional("FP32", "sampling_param_presence_penalty", "sampling_param_frequency_penalty"),
    *_optional("UINT64", "sampling_param_seed"),
    *_optional("STRING", "sampling_param_stop", dims=-1),
    *_optional("BOOL", "sampling_param_exclude_input_from_output"),
    *_optional("BOOL", "sampling_param_return_perf_metrics"),
    *_optional("BOOL", "streaming"),
    # Those from here on are refused.
    *_REFUSED_TENSORRT_LLM,
    *_optional("STRING", "image", "image_url", dims=-1),
    *_optional("STRING", "decoder_text_input", "lora_name", "lora_path", "lora_ckpt_source"),
    *_optional("UINT64", "lora_id", "prompt_table_extra_id"),
]
# Of the model that answers once, for which a further input costs nothing.
UNARY_REQUEST = [
    *REQUEST,
    *(tensor for tensor in _ENGINE_NAMES if tensor not in REQUEST),
    *_optional("STRING", "image_url_input"),
    *_optional("FP16", "image_input", dims=(-1, 3, -1, -1)),
    *_optional("UINT8", "image_bytes_input", "video_bytes_input", dims=(-1, -1, -1, -1)),
    *_optional("INT32", "num_draft_tokens"),
    *_optional("BOOL", "use_draft_logits"),
]

RESPONSE = [
    Tensor("text_output", "STRING", -1),
    Tensor("finish_reason", "STRING", -1),
    Tensor("stop_reason", "STRING", -1),
    Tensor("cum_log_probs", "FP32", -1),
    Tensor("output_log_probs", "FP32", -1),
    Tensor("cumulative_logprob", "FP32", -1),
    Tensor("logprobs", "STRING", -1),
    Tensor("sections", "STRING", -1),
    Tensor("prompt_log_probs", "FP32", -1),
    Tensor("prompt_logprobs", "STRING"),
    Tensor("embedding", "FP32", -1),
    Tensor("num_input_tokens", "INT32", -1),
    Tensor("num_output_tokens", "INT32", -1),
    Tensor("sequence_index", "INT32", -1),
    Tensor("num_cached_tokens", "INT64", -1),
    Tensor("kv_cache_reused_blocks", "INT64", -1),
    Tensor("kv_cache_alloc_new_blocks", "INT64", -1),
    Tensor("kv_cache_alloc_total_blocks", "INT64", -1),
    Tensor("arrival_time_ns", "INT64", -1),
    Tensor("first_scheduled_time_ns", "INT64", -1),
    Tensor("first_token_time_ns", "INT64", -1),
    Tensor("last_token_time_ns", "INT64", -1),
    Tensor("acceptance_rate", "FP32", -1),
    Tensor("total_accepted_draft_tokens", "INT64", -1),
    Tensor("total_draft_tokens", "INT64", -1),
]

# Those that need a tokenizer. The engine gives the ensemble the others itself: Triton hands the
# names of a step's outputs to its model with each of its requests, which of the engine is one, and
# of the detokenizer one per response. Each name takes some microseconds, whether used or not.
_OF_DETOKENIZER = ("text_output", "logprobs", "sections", "prompt_logprobs")

# Outputs that vllm_backend declares differently from TensorRT-LLM.
_OF_VLLM = {
    "num_input_tokens": Tensor("num_input_tokens", "UINT32"),
    "num_output_tokens": Tensor("num_output_tokens", "UINT32", -1),
}

# What the tokenizer sends to the engine; clients that tokenise themselves give it directly.
ENGINE_REQUEST = [
    Tensor("input_ids", "INT32", -1),
    Tensor("sampling_parameters", "STRING"),
    Tensor("stream", "BOOL"),
    Tensor("priority", "INT32"),
    Tensor("timeout", "UINT64"),
    Tensor("response_options", "UINT8", -1),
    Tensor("stop", "BOOL"),
]

# What clients that tokenise themselves may send beside or instead of `sampling_parameters`, as to
# TensorRT-LLM's engine; some of it is refused.
ENGINE_CLIENT_REQUEST = [
    *_optional("BOOL", "health"),
    *_optional("INT32", "input_lengths", "num_return_sequences", "beam_width", "end_id", "pad_id"),
    *_optional("INT32", "max_tokens", "min_tokens", "min_length", "top_k"),
    *_optional("FP32", "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *_optional("FP32", "frequency_penalty", "length_penalty"),
    *_optional("UINT64", "seed", "random_seed"),
    *_optional("BOOL", "early_stopping", "return_log_probs", "return_num_input_tokens"),
    *_optional("BOOL", "return_num_output_tokens", "return_finish_reason", "return_perf_metrics"),
    *_optional("BOOL", "exclude_input_in_output"),
    *_optional("BOOL", "return_context_logits", "return_generation_logits"),
    *_ENGINE_NAMES,
    *_REFUSED_TENSORRT_LLM,
    *_optional("INT32", "draft_input_ids", "decoder_input_ids", dims=-1),
    *_optional("FP32", "draft_logits", dims=(-1, -1)),
    *_optional("FP32", "draft_acceptance_threshold"),
    *_optional("INT32", "decoder_input_lengths", "encoder_output_lengths"),
    *_optional("FP16", "encoder_input_features", dims=(-1, -1)),
    *_optional("INT32", "stop_words_list", "bad_words_list", dims=(2, -1)),
    *_optional("FP32", "embedding_bias", dims=-1),
    *_optional("FP32", "runtime_top_p_min", "runtime_top_p_decay"),
    *_optional("INT32", "runtime_top_p_reset_ids"),
    *_optional("UINT64", "prompt_table_extra_ids", dims=-1),
    *_optional("BOOL", "cross_attention_mask", dims=(-1, -1)),
    *_optional("BOOL", "skip_cross_attn_blocks"),
    *_optional("FP32", "mrope_rotary_cos_sin", dims=-1),
    *_optional("INT64", "mrope_position_deltas"),
    *_optional("UINT8", "context_phase_params", dims=-1),
    *_optional("INT32", "retention_token_range_starts", "retention_token_range_ends", dims=-1),
    *_optional("INT32", "retention_token_range_priorities", dims=-1),
    *_optional("INT32", "retention_token_range_durations_ms", dims=-1),
    *_optional("INT32", "retention_decode_priority", "retention_decode_duration_ms"),
    *_optional("INT32", "lookahead_window_size", "lookahead_ngram_size"),
    *_optional("INT32", "lookahead_verification_set_size"),
    *_optional("STRING", "guided_decoding_guide_type", "guided_decoding_guide"),
]

DETOKENIZER_INPUT = Tensor("detokenizer_input", "UINT8", -1)

# What the tokenizer alone is asked, and its answers; with text_input, messages or input_ids.
TOKENIZE_REQUEST = _optional("BOOL", "tokenize", "add_special_tokens", "detokenize")
TOKENIZE_RESPONSE = [
    Tensor("token_texts", "STRING", -1),
    Tensor("max_model_len", "INT32"),
    Tensor("text", "STRING"),
]

# What the engine sends its own clients beside the outputs that it gives to the ensemble.
ENGINE_RESPONSE = [Tensor("token_ids", "INT32", -1), Tensor("health", "STRING")]

_ONE_INSTANCE = "instance_group [ { kind: KIND_CPU count: 1 } ]\n"

_HEAD = """\
# Text in, text out: tokenizer -> engine -> detokenizer. Needs text_input, messages or input_ids.
platform: "ensemble"
"""

_TOKENIZER = """\
# Validates and tokenises. The inputs are the ensemble's, and `tokenize` or `detokenize` of a client
# that wants nothing else. No dynamic_batching, although Triton
# limits a queue (max_queue_size) only with it: in release 24.10 a burst of 1,500 requests then
# stalls for 30 s and more on two busy cores; without it, it took 0.5 to 3 s there.
backend: "python"
"""

_ENGINE = """\
# Continuous batching inside; settings in 1/engine.json. Needs input_ids, or one of
# stop and health; response_options and detokenizer_input are between the stages.
backend: "python"
"""

_UNARY = """\
# Plain infer(): what the ensemble streams, in one response. The name is that of the model in
# TensorRT-LLM's repository which takes the ensemble's inputs, and answers once unless decoupled.
backend: "python"
"""

_DETOKENIZER = """\
# Exactly one instance: with several, the responses of a request overtake each other. No dynamic
# batching, although it would halve this stage's time under load: it drops what was cancelled, which
# ends the request of the ensemble while its engine step runs. Release 24.10 never frees such a
# request: it stays in flight, and the models cannot be unloaded.
backend: "python"
"""


def write(repository: Path = REPOSITORY) -> None:
    """Write the configurations of all models below `repository`."""
    for path, text in configurations().items():
        file = repository / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


def configurations() -> dict[str, str]:
    """Return the text of each configuration, by path in the repository."""
    return {
        f"{model}/{config.file}": text
        for config in CONFIG_FORMATS
        for model, text in _models(config)
    }


def _models(config: ConfigFormat) -> Iterable[tuple[str, str]]:
    size = f"max_batch_size: {config.max_batch_size}\n"
    others = _OF_VLLM if config is VLLM else {}
    response = [others.get(tensor.name, tensor) for tensor in RESPONSE]
    of_detokenizer, of_engine = _by_model(response)
    to_engine = [replace(tensor, optional=True) for tensor in ENGINE_REQUEST]
    yield ENSEMBLE, _HEAD + size + _tensors(REQUEST, response) + _scheduling()
    yield (
        "tokenizer",
        _TOKENIZER
        + size
        + _tensors([*REQUEST, *TOKENIZE_REQUEST], [*ENGINE_REQUEST, *TOKENIZE_RESPONSE])
        + _ONE_INSTANCE,
    )
    yield (
        "engine",
        _ENGINE
        + size
        + "model_transaction_policy { decoupled: true }\n"
        + _tensors(
            [*to_engine, *ENGINE_CLIENT_REQUEST],
            [*ENGINE_RESPONSE, *of_engine, DETOKENIZER_INPUT],
        )
        + _ONE_INSTANCE,
    )
    yield UNARY, _UNARY + size + _tensors(UNARY_REQUEST, response) + _ONE_INSTANCE
    yield (
        "detokenizer",
        _DETOKENIZER + size + _tensors([DETOKENIZER_INPUT], of_detokenizer) + _ONE_INSTANCE,
    )


def _by_model(response: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs of the detokenizer, and those of the engine."""
    of_detokenizer = [tensor for tensor in response if tensor.name in _OF_DETOKENIZER]
    return of_detokenizer, [tensor for tensor in response if tensor.name not in _OF_DETOKENIZER]


def _tensors(inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> str:
    return "".join(
        f"{kind} [\n" + ",\n".join(tensor.line() for tensor in tensors) + "\n]\n"
        for kind, tensors in (("input", inputs), ("output", outputs))
    )


def _scheduling() -> str:
    """Return the steps of the ensemble; between them tensors have names of their own."""
    request = _same(REQUEST)
    of_detokenizer, of_engine = map(_same, _by_model(RESPONSE))
    between = {tensor.name: f"engine_{tensor.name}" for tensor in ENGINE_REQUEST}
    message = _same([DETOKENIZER_INPUT])
    steps = [
        _step("tokenizer", request, between),
        _step("engine", between, {**of_engine, **message}),
        _step("detokenizer", message, of_detokenizer),
    ]
    return "ensemble_scheduling {\n  step [\n" + ",\n".join(steps) + "\n  ]\n}\n"


def _same(tensors: Iterable[Tensor]) -> dict[str, str]:
    return {tensor.name: tensor.name for tensor in tensors}


def _step(model: str, inputs: dict[str, str], outputs: dict[str, str]) -> str:
    """Return a step; `inputs` and `outputs` are the ensemble's names by the model's."""
    lines = [f'model_name: "{model}"', "model_version: -1"]
    for kind, names in (("input", inputs), ("output", outputs)):
        lines += [f'{kind}_map {{ key: "{key}" value: "{names[key]}" }}' for key in names]
    return "    {\n" + "".join(f"      {line}\n" for line in lines) + "    }"


if __name__ == "__main__":
    write()
