"""Fields that requests for completions and for chats share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError

from client.gateway.schemas.first_fault import (
    ONE_BY_ONE,
    end_lists_at_first_fault,
    refuse_first_unknown,
)
from client.gateway.schemas.limits import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_CACHE_SALT_CHARACTERS,
    MAX_DRY_BREAKER_CHARACTERS,
    MAX_DRY_BREAKERS,
    MAX_GRAMMAR_CHARACTERS,
    MAX_LOGIT_BIAS,
    MAX_LOGITS_PROCESSORS,
    MAX_REGEX_CHARACTERS,
    MAX_SCHEMA_CHARACTERS,
    MAX_STOP_TOKEN_IDS,
    MAX_WORD_CHARACTERS,
    MAX_WORDS,
    MAX_WORDS_CHARACTERS,
    AtMost,
    words,
)

_NULL = {"type": "null"}


class Fields(BaseModel):
    """A JSON object of a client: unknown fields and other types than declared are refused.

    Null is as good as absent, whatever the field: clients send all that they know of.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        given = {name: inner for name, inner in value.items() if inner is not None}
        if len(given) > len(cls.model_fields):  # some are unknown
            known = {field.alias or name for name, field in cls.model_fields.items()}
            refuse_first_unknown(cls.__name__, given, known)
        return given

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Return the schema, by which lists end at their first fault."""
        made = handler(source)
        end_lists_at_first_fault(made)
        return made

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return the schema, by which fields that may be absent may be null."""
        made = handler(core_schema)
        inner = handler.resolve_ref_schema(made)
        for name, field in inner.get("properties", {}).items():
            if name not in inner.get("required", ()) and _NULL not in field.get("anyOf", ()):
                inner["properties"][name] = {"anyOf": [field, _NULL]}
        return made


def fault(text: str, kind: str = "value_error") -> WrapValidator:
    """Return a validator whose fault is `text` for all that a union of types does not take.

    Args:
        kind: pydantic's type of the fault; "unsupported" for what may be offered some day.
    """

    def validate(value: Any, inner: Callable[[Any], Any]) -> Any:
        try:
            return inner(value)
        except ValidationError as error:
            raise ValidationError.from_exception_data(
                error.title, [_fault(error, text, kind, value)]
            ) from None

    return WrapValidator(validate)


def unsupported(text: str) -> WrapValidator:
    """Return a validator for a field of which this server takes one value; as `fault`."""
    return fault(text, "unsupported")


def _fault(error: ValidationError, text: str, kind: str, value: Any) -> InitErrorDetails:
    """Return `text` as the fault at the first element that no member of a union takes."""
    element = max(tuple(p for p in each["loc"] if isinstance(p, int)) for each in error.errors())
    whole = f"is wrong: the field {text}" if element else text
    custom = PydanticCustomError(kind, "{text}", {"text": whole})
    return InitErrorDetails(type=custom, loc=element, input=value)


def _boolean(value: Any) -> Any:
    """Refuse ints: a bool is an int in Python."""
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


Yes = Annotated[Literal[True], BeforeValidator(_boolean)]
No = Annotated[Literal[False], BeforeValidator(_boolean)]

Verbosity = Annotated[
    Literal["medium"] | None, unsupported("only medium is supported: models cannot control it")
]
NoTemplate = Annotated[
    None,
    unsupported("not supported: a request's own template may never end; the server's is used"),
]
_FEW_WORDS = words(MAX_WORDS, MAX_WORD_CHARACTERS, MAX_WORDS_CHARACTERS)
Words = Annotated[str | list[str], fault("must be a string or a list of strings"), _FEW_WORDS]

Schema = Annotated[
    dict[str, Any] | str | bool,
    fault("must be a JSON schema, as an object or as its text"),
    AtMost(MAX_SCHEMA_CHARACTERS, "characters"),
]
Processors = Annotated[
    list[str | dict[str, Any]],
    fault("must be a list of names, or of objects with name and args"),
    AtMost(MAX_LOGITS_PROCESSORS, "processors"),
]


class StreamOptions(Fields):
    """What a stream has beside its pieces."""

    include_usage: bool | None = None
    include_obfuscation: No | None = None  # pieces have no padding
    continuous_usage_stats: bool | None = None  # vLLM's: usage so far, in every piece


class SamplingFields(Fields):
    """Sampling parameters, in OpenAI's and vLLM's names.

    They go to the engine as they are, which checks their values; their sizes are checked here. What
    the engine does not offer is refused there by name.
    """

    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: Words | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], ONE_BY_ONE, AtMost(MAX_LOGIT_BIAS, "tokens")] | None = (
        None
    )
    response_format: dict[str, Any] | None = None
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    top_n_sigma: float | None = None
    typical_p: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: (
        Annotated[list[str], words(MAX_DRY_BREAKERS, MAX_DRY_BREAKER_CHARACTERS)] | None
    ) = None
    logits_processors: Processors | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stop_token_ids: Annotated[list[int], AtMost(MAX_STOP_TOKEN_IDS, "tokens")] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: Annotated[list[str], _FEW_WORDS] | None = None
    allowed_token_ids: Annotated[list[int], AtMost(MAX_ALLOWED_TOKEN_IDS, "tokens")] | None = None
    prompt_logprobs: int | None = None
    structured_outputs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    guided_json: Schema | None = None
    guided_regex: Annotated[str, AtMost(MAX_REGEX_CHARACTERS, "characters")] | None = None
    guided_choice: list[str] | None = None
    guided_grammar: Annotated[str, AtMost(MAX_GRAMMAR_CHARACTERS, "characters")] | None = None
    guided_whitespace_pattern: str | None = None
    cache_salt: Annotated[str, AtMost(MAX_CACHE_SALT_CHARACTERS, "characters")] | None = None
    beam_width: int | None = None  # Trident's own
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    truncate_prompt_tokens: int | None = None
    # Refused by the engine, unless it asks for the default.
    spaces_between_special_tokens: bool | None = None

    def sampling(self) -> dict[str, Any]:
        """Return those that were given."""
        given = ((name, getattr(self, name)) for name in SamplingFields.model_fields)
        return {name: value for name, value in given if value is not None}


class RequestFields(SamplingFields):
    """Fields of a request that are not sampling parameters.

    `user`, `safety_identifier` and `prompt_cache_key` have no effect: the first two report abuse
    to OpenAI, and here prefixes are shared by what they are. Nor has `request_id`: a request has
    an id that nobody else can give. Nor `guided_decoding_backend`: there is one.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    return_tokens_as_token_ids: bool | None = None
    # vLLM's, as they are here.
    request_id: str | None = None
    guided_decoding_backend: str | None = None
    return_token_ids: Annotated[No, unsupported("not supported: use logprobs")] = False
    detokenize: Annotated[Yes, unsupported("not supported: output is always detokenised")] = True

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every piece of a stream has the usage so far."""
        return self.include_usage and bool(
            self.stream_options is not None and self.stream_options.continuous_usage_stats
        )
