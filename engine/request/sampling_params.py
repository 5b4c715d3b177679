"""SamplingParams: the sampling parameters of one request, in vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from engine.errors import RequestError
from engine.logits_processors import AskedLogitsProcessor
from engine.text.grammar import request_formats
from engine.text.grammar.spec import GrammarSpec
from engine.validation import unsupported
from engine.validation.checks import error_of
from engine.validation.limits import (
    MAX_ABSOLUTE_LOGIT_BIAS,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BEAM_WIDTH,
    MAX_DRY_BREAKER_CHARACTERS,
    MAX_DRY_BREAKERS,
    MAX_LENGTH_PENALTY,
    MAX_LOGIT_BIAS,
    MAX_LOGITS_PROCESSORS,
    MAX_SEQUENCES,
    MAX_STOP_TOKEN_IDS,
    MAX_WORD_CHARACTERS,
    MAX_WORDS,
    MAX_WORDS_CHARACTERS,
)
from engine.validation.unsupported import means

_Finite = Annotated[float, Field(allow_inf_nan=False)]
# Larger integers would not fit the messages and tensors that carry them.
_Count = Annotated[int, Field(ge=0, lt=2**31)]
_TokenId = _Count
_Bias = Annotated[_Finite, Field(ge=-MAX_ABSOLUTE_LOGIT_BIAS, le=MAX_ABSOLUTE_LOGIT_BIAS)]
_Words = tuple[Annotated[str, Field(max_length=MAX_WORD_CHARACTERS)], ...]
_Breakers = tuple[Annotated[str, Field(max_length=MAX_DRY_BREAKER_CHARACTERS)], ...]

_MAX_SIZES = {
    "stop": MAX_WORDS,
    "bad_words": MAX_WORDS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "logit_bias": MAX_LOGIT_BIAS,
    "allowed_token_ids": MAX_ALLOWED_TOKEN_IDS,
    "dry_sequence_breakers": MAX_DRY_BREAKERS,
    "logits_processors": MAX_LOGITS_PROCESSORS,
}

# What -1 means, as in vLLM.
_MINUS_ONE = {"top_k": 0, "top_n_sigma": 0, "seed": None, "thinking_token_budget": None}

NOT_WITH_BEAMS = (
    *("best_of", "stop", "structured_outputs", "thinking_token_budget"),
    *("logits_processors", "dry_multiplier"),
)


def with_beam_width(fields: dict[str, Any]) -> dict[str, Any]:
    """Return `fields` with vLLM's `use_beam_search` as `beam_width`: `best_of`, or else `n`.

    Fields of beam search that are None are left out: clients of other servers send them.

    Raises:
        RequestError: `use_beam_search` is neither true nor false, or there is only one beam.
    """
    for name in ("beam_width", "length_penalty", "early_stopping"):
        if fields.get(name, 0) is None:
            del fields[name]
    asked = fields.pop("use_beam_search", None)
    if asked is None or means(asked, False):
        return fields
    if not means(asked, True):
        raise RequestError("must be true or false", param="use_beam_search")
    if "beam_width" in fields:
        return fields
    width = fields.pop("best_of", None)
    fields["beam_width"] = (fields.get("n") or 1) if width is None else width
    if means(fields["beam_width"], 1):
        raise RequestError(
            "needs best_of or n above 1, the number of beams", param="use_beam_search"
        )
    return fields


class SamplingParams(BaseModel):
    """How the tokens of one request are chosen and when it ends. Immutable.

    Construction raises `ValueError` naming each wrong field, `parse` a shorter one. Both take what
    clients of other servers send: numbers as strings (`"16"`), structured outputs and beam search
    in all their forms, and values of fields that Trident does not have which ask for nothing.

    Attributes:
        n: sequences sampled from the one prompt; they share its KV blocks. With `best_of` or
            `beam_width` the best ones of these.
        best_of: sequences sampled, of which the `n` with the highest mean log-probability per token
            are the outputs; None: `n`. Above `n` everything comes at the end.
        beam_width: above 1, outputs come from a beam search over so many beams: not drawn, but the
            most likely that it finds, best first. `temperature`, `top_k`, `top_p`, `min_p` and
            `seed` have no effect then. With `n` 1, tokens are streamed once all beams share them.
        length_penalty: of a beam search, in [-10, 10]: outputs are ranked by the sum of their
            log-probabilities, divided by their length to this power. Above 0 favours longer ones.
        early_stopping: when a beam search ends, as in transformers: True, with `beam_width` ended
            outputs; False, when no better one is likely; "never", when none is possible.
        temperature: 0 is greedy.
        top_k: 0 or -1 keeps every token.
        top_p: probability mass kept, in (0, 1].
        min_p: tokens below `min_p * max probability` are dropped, in [0, 1].
        top_n_sigma: tokens whose logit is more than so many standard deviations below the largest
            one are dropped; 0 or -1 keeps every token.
        typical_p: probability mass kept, of the tokens whose information is nearest to what is
            expected (locally typical sampling), in (0, 1]. Like `top_n_sigma`, which comes first,
            it applies before the other filters.
        repetition_penalty: > 1 discourages tokens of the prompt and the output.
        presence_penalty, frequency_penalty: subtracted per token of the output, in [-2, 2].
        dry_multiplier: DRY, which penalises tokens that continue a repetition of the prompt or the
            output; 0 is off. A token that continues one of n tokens gets
            `dry_multiplier * dry_base ** (n - dry_allowed_length)` less.
        dry_base: at least 1.
        dry_allowed_length: shortest repetition that is penalised.
        dry_penalty_last_n: tokens in which repetitions are looked for; -1 is the most, 0 none.
        dry_sequence_breakers: strings across which no repetition reaches.
        logits_processors: of installed packages, see `engine.logits_processors`; a name, or an
            object with `name` and `args`.
        seed: the same seed gives the same tokens, whatever else is batched; None or -1 draws one.
            64 bits, with a sign, as OpenAI's, or without.
        max_tokens: output tokens at most; None means the rest of the context. 0 is possible with
            `prompt_logprobs`.
        min_tokens: output tokens before which end-of-sequence and stop tokens are masked.
        stop: strings that end the output; matched on text, across token borders. Like
            `bad_words`, at most 256 of at most 1024 characters, 8192 in all.
        stop_token_ids: tokens that end the output, beside the model's own.
        include_stop_str_in_output: keep the matched stop string in the text.
        bad_words: strings that must not be produced.
        ignore_eos: continue after the model's end-of-sequence tokens.
        logprobs: number of most likely tokens to report per position, beside the chosen one.
        prompt_logprobs: the same for each token of the prompt but the first. Then the KV of the
            prompt does not come from the prefix cache.
        logit_bias: added to the logits of these token ids, -100 to 100 for each.
        allowed_token_ids: only these tokens may be produced.
        structured_outputs: what the output must match, in vLLM's form (a key `json`, `json_object`,
            `regex`, `choice`, `grammar` or `structural_tag`).
        thinking_token_budget: tokens of reasoning, after which the tag that ends it comes; None or
            -1: no limit. A character that is begun is completed.
        truncate_prompt_tokens: the prompt is cut to its last so many tokens; -1: to what the model
            takes beside `max_tokens`; None: it is not, and refused if it is too long.
        skip_special_tokens: leave special tokens out of the text.
        return_sections: split the text into content, reasoning and tool calls.
        return_embedding: the embedding of the prompt is the output; no token is.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    n: Annotated[int, Field(ge=1, le=MAX_SEQUENCES)] = 1
    best_of: Annotated[int, Field(ge=1, le=MAX_SEQUENCES)] | None = None
    beam_width: Annotated[int, Field(ge=1, le=MAX_BEAM_WIDTH)] = 1
    length_penalty: Annotated[_Finite, Field(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)] = 1.0
    early_stopping: bool | Literal["never"] = False
    temperature: Annotated[_Finite, Field(ge=0)] = 1.0
    top_k: _Count = 0
    top_p: Annotated[_Finite, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[_Finite, Field(ge=0, le=1)] = 0.0
    top_n_sigma: Annotated[_Finite, Field(ge=0)] = 0.0
    typical_p: Annotated[_Finite, Field(gt=0, le=1)] = 1.0
    repetition_penalty: Annotated[_Finite, Field(gt=0)] = 1.0
    presence_penalty: Annotated[_Finite, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[_Finite, Field(ge=-2, le=2)] = 0.0
    dry_multiplier: Annotated[_Finite, Field(ge=0)] = 0.0
    dry_base: Annotated[_Finite, Field(ge=1)] = 1.75
    dry_allowed_length: _Count = 2
    dry_penalty_last_n: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    dry_sequence_breakers: _Breakers = ("\n", ":", '"', "*")
    logits_processors: tuple[AskedLogitsProcessor, ...] = ()
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    max_tokens: _Count | None = 16
    min_tokens: _Count = 0
    stop: _Words = ()
    stop_token_ids: tuple[_TokenId, ...] = ()
    include_stop_str_in_output: bool = False
    bad_words: _Words = ()
    ignore_eos: bool = False
    logprobs: _Count | None = None
    prompt_logprobs: _Count | None = None
    logit_bias: dict[_TokenId, _Bias] | None = None
    allowed_token_ids: tuple[_TokenId, ...] | None = None
    structured_outputs: GrammarSpec | None = None
    thinking_token_budget: _Count | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    skip_special_tokens: bool = True
    return_sections: bool = False
    return_embedding: bool = False

    @classmethod
    def parse(
        cls, fields: Mapping[str, Any], *, defaults: Mapping[str, Any] = {}
    ) -> SamplingParams:
        """Build from untrusted fields, on top of `defaults`.

        Raises:
            UnsupportedError: a field of vLLM or SGLang that Trident does not implement.
            RequestError: an unknown field or a wrong value; the text names it.
        """
        try:
            return cls.model_validate({**defaults, **fields})
        except ValidationError as error:
            raise error_of(error, RequestError) from None

    def clone(self) -> SamplingParams:
        """Return these, which nobody can change; code for vLLM calls it."""
        return self

    @property
    def widest(self) -> tuple[str, int]:
        """The field that sets how many sequences run for the request, and their number."""
        if self.beam_width > 1:
            return "beam_width", self.beam_width
        return ("n", self.n) if self.best_of is None else ("best_of", self.best_of)

    @property
    def num_sequences(self) -> int:
        """How many sequences run for the request; `n` of them are its outputs."""
        return self.widest[1]

    @model_validator(mode="before")
    @classmethod
    def _of_other_servers(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        known = with_beam_width(request_formats.merged(fields))
        return unsupported.without(known, unsupported.PARAMETERS)

    @field_validator(*_MAX_SIZES, mode="before")
    @classmethod
    def _not_too_long(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse a list that is too long before its elements are validated one by one."""
        assert info.field_name is not None
        limit = _MAX_SIZES[info.field_name]
        if isinstance(value, (list, tuple, dict)) and len(value) > limit:
            raise ValueError(f"must have at most {limit} elements, not {len(value)}")
        return value

    @field_validator(*_MINUS_ONE, mode="before")
    @classmethod
    def _disabled(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        return _MINUS_ONE[info.field_name] if value in (-1, "-1") else value

    @field_validator("logprobs", "prompt_logprobs", mode="before")
    @classmethod
    def _not_all(cls, value: Any) -> Any:
        if value in (-1, "-1"):
            raise ValueError(
                "Input should be greater than or equal to 0: -1 (all tokens, as in vLLM) is not "
                "supported"
            )
        return value

    @field_validator("logits_processors", mode="before")
    @classmethod
    def _names_alone(cls, value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            return () if value is None else value
        return tuple({"name": each} if isinstance(each, str) else each for each in value)

    @field_validator("stop", "bad_words", "dry_sequence_breakers", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        """Accept one string or a list; clients of other servers send `""` for none."""
        if value is None:
            return ()
        if isinstance(value, str):
            value = (value,)
        return (
            tuple(word for word in value if word != "")
            if isinstance(value, (list, tuple))
            else value
        )

    @field_validator("stop", "bad_words")
    @classmethod
    def _few_characters(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if (total := sum(map(len, value))) > MAX_WORDS_CHARACTERS:
            raise ValueError(
                f"must have at most {MAX_WORDS_CHARACTERS} characters in all, not {total}"
            )
        return value

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _none_is_empty(cls, value: Any) -> Any:
        return () if value is None else value

    @model_validator(mode="after")
    def _consistent(self) -> SamplingParams:
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise RequestError(
                "must be at least 1 without prompt_logprobs (got 0)", param="max_tokens"
            )
        if self.truncate_prompt_tokens == 0:
            raise RequestError("must be at least 1, or -1 (got 0)", param="truncate_prompt_tokens")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"must not exceed max_tokens ({self.min_tokens} > {self.max_tokens})",
                param="min_tokens",
            )
        if self.best_of is not None and self.best_of < self.n:
            raise RequestError(f"must be at least n ({self.best_of} < {self.n})", param="best_of")
        if self.beam_width > 1:
            self._check_beams()
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("must not be empty", param="allowed_token_ids")
        return self

    def _check_beams(self) -> None:
        if self.n > self.beam_width:
            raise RequestError(
                f"must not exceed beam_width ({self.n} > {self.beam_width})", param="n"
            )
        for name in NOT_WITH_BEAMS:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise RequestError("is not supported with beam_width above 1", param=name)
        if self.max_tokens == 0:
            raise RequestError(
                "must be at least 1 with beam_width above 1 (got 0)", param="max_tokens"
            )
