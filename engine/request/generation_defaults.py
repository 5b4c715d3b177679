"""A checkpoint's end tokens and sampling defaults: `generation_config.json` and substitutes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.config import overridden
from engine.checkpoint.json_files import read_object
from engine.config.engine_config import EngineConfig
from engine.errors import CheckpointError, ConfigError, RequestError
from engine.request.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer
from kernels.step.sampling_columns import DRAW_FEATURES, SAMPLING_COLUMNS

_FILE = "generation_config.json"
_OVERRIDES = "override_generation_config"
# Settings in the file that shape the distribution that a token is drawn from.
_FILTERS = ("top_p", "top_k", "min_p", "typical_p")
_SAMPLING_FIELDS = ("temperature", *_FILTERS, "repetition_penalty")
_FIELDS = (*_SAMPLING_FIELDS, "do_sample", "eos_token_id", "pad_token_id")  # that have an effect


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Defaults of requests to one checkpoint, with transformers' meaning of its file.

    Attributes:
        eos_token_ids: tokens that end a sequence: the files', in their order, and the tokenizer's;
            may be empty.
        pad_token_id: None where the checkpoint names none.
        do_sample: sampling is the default; otherwise greedy decoding is.
        sampling: the sampling fields of the file that apply in that mode.
    """

    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    do_sample: bool
    sampling: Mapping[str, float]

    @classmethod
    def from_checkpoint(
        cls, path: Path, tokenizer: Tokenizer, vocab_size: int, settings: EngineConfig
    ) -> GenerationDefaults:
        """Read `generation_config.json` of the folder `path`, as far as `settings` want it.

        End and padding tokens that it does not name are taken from `config.json`; the padding token
        then from `tokenizer`, whose end token always ends a sequence too: the chats of a fine-tune
        may end with it, whatever files of the model before name.

        Args:
            vocab_size: the model's; it never draws a token beyond.

        Raises:
            CheckpointError: one of the files is malformed, or names an end token beyond the model's
                vocabulary.
            ConfigError: the same of `override_generation_config`.
        """
        generation = _generation(read_object(path / _FILE), settings, vocab_size)
        config = overridden(read_object(path / "config.json"), settings.hf_overrides)
        eos = _end_tokens(generation, _FILE, vocab_size) or _end_tokens(
            config, "config.json", vocab_size
        )
        own_eos = tokenizer.eos_token_id
        if own_eos is not None and own_eos not in eos and own_eos < vocab_size:
            eos = (*eos, own_eos)
        pad = _padding_tokens(generation, _FILE) or _padding_tokens(config, "config.json")
        do_sample = _do_sample(generation)
        return cls(
            eos_token_ids=eos,
            pad_token_id=pad[0] if pad else tokenizer.pad_token_id,
            do_sample=do_sample,
            sampling=_sampling(generation, sample=do_sample),
        )

    def sampling_defaults(self, fields: Mapping[str, Any]) -> dict[str, float]:
        """Return the `defaults` of `SamplingParams.parse` for a request that sets `fields`.

        Where greedy decoding is the default, a request that shapes the distribution (by top_p,
        say) without a temperature is sampled at temperature 1.
        """
        if self.do_sample:
            return dict(self.sampling)
        samples = any(
            fields.get(name) is not None
            for name, column in SAMPLING_COLUMNS.items()
            if column.feature & DRAW_FEATURES
        )
        return {**self.sampling, "temperature": 1.0 if samples else 0.0}


def _generation(
    found: Mapping[str, Any], settings: EngineConfig, vocab_size: int
) -> dict[str, Any]:
    """Return the fields `found` of the file, as the settings change them."""
    fields = dict(found)
    if settings.generation_config == "vllm":
        fields = {name: value for name, value in found.items() if name not in _SAMPLING_FIELDS}
        fields["do_sample"] = True
    given = settings.override_generation_config or {}
    if unknown := given.keys() - set(_FIELDS):
        raise ConfigError(
            f"has no effect; supported: {', '.join(_FIELDS)}", param=f"{_OVERRIDES}: {min(unknown)}"
        )
    if not given.keys().isdisjoint(("temperature", *_FILTERS)):
        fields["do_sample"] = True
    try:
        _sampling(given, sample=True)
        _do_sample(given)
        _end_tokens(given, _FILE, vocab_size)
        _padding_tokens(given, _FILE)
    except CheckpointError as error:
        param = error.params[0].replace(_FILE, _OVERRIDES)
        raise ConfigError(error.message, param=param) from None
    return {**fields, **given}


def _do_sample(fields: Mapping[str, Any]) -> bool:
    value = fields.get("do_sample")
    if not isinstance(value, (bool, type(None))):
        raise CheckpointError(f"must be true or false (got {value!r})", param=f"{_FILE}: do_sample")
    return bool(value)


def _sampling(generation: Mapping[str, Any], *, sample: bool) -> dict[str, float]:
    names = _SAMPLING_FIELDS if sample else ("repetition_penalty",)
    fields = {name: generation[name] for name in names if generation.get(name) is not None}
    try:
        params = SamplingParams.parse(fields)
    except RequestError as error:
        raise CheckpointError(error.message, param=f"{_FILE}: {error.params[0]}") from None
    return {name: getattr(params, name) for name in fields}


def _end_tokens(fields: Mapping[str, Any], file_name: str, vocab_size: int) -> tuple[int, ...]:
    tokens = _token_ids(fields, file_name, "eos_token_id")
    for token_id in tokens:
        if token_id >= vocab_size:
            raise CheckpointError(
                f"must be below the model's vocab_size {vocab_size} (got {token_id})",
                param=f"{file_name}: eos_token_id",
            )
    return tokens


def _padding_tokens(fields: Mapping[str, Any], file_name: str) -> tuple[int, ...]:
    value = fields.get("pad_token_id")
    is_none = type(value) is int and value < 0  # Llama's conversions wrote -1 for none
    return () if is_none else _token_ids(fields, file_name, "pad_token_id")


def _token_ids(fields: Mapping[str, Any], file_name: str, name: str) -> tuple[int, ...]:
    value = fields.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise CheckpointError(
            f"must be a token id or a list (got {value!r})", param=f"{file_name}: {name}"
        )
    return tuple(dict.fromkeys(ids))
