"""Public types: sampling options, chunks, completions, log-probabilities, health."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

import msgspec

from client.timeouts import Timeout


@dataclass(frozen=True, slots=True)
class Json:
    """The value of a sampling option that is JSON already, so that many requests share it."""

    text: str


class SamplingOptions(TypedDict, total=False):
    """Sampling parameters of a request, in vLLM's names; see `engine.SamplingParams`."""

    n: int
    best_of: int | None
    beam_width: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    top_n_sigma: float
    typical_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: Sequence[str]
    logits_processors: Sequence[str | Mapping[str, Any]]
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    bad_words: Sequence[str]
    ignore_eos: bool
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    skip_special_tokens: bool
    return_sections: bool
    return_embedding: bool
    logprobs: int | None
    prompt_logprobs: int | None
    structured_outputs: Mapping[str, Any] | None
    thinking_token_budget: int | None
    truncate_prompt_tokens: int | None
    response_format: Mapping[str, Any] | None
    cache_salt: str
    tenant: str
    tenant_key: str
    echo: bool


class ChatParameters(TypedDict, total=False):
    """What the chat template gets beside the messages; see `engine.text.chat_parameters`."""

    tools: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any]


Message = Mapping[str, Any]  # {"role": "user", "content": "..."}
Prompt = str | list[int] | tuple[int, ...]  # text, or token ids


class RequestOptions(SamplingOptions, total=False):
    """What a request may have beside its prompt; see `TridentClient.generate`."""

    messages: Sequence[Message] | None
    chat_parameters: ChatParameters | None
    timeout: float | Timeout | None
    priority: int
    request_id: str


class TokenizeOptions(TypedDict, total=False):
    """What may be tokenized instead of a text, and how; see `TridentClient.tokenize`."""

    messages: Sequence[Message] | None
    chat_parameters: ChatParameters | None
    add_special_tokens: bool | None
    tenant: str
    tenant_key: str
    timeout: float | None


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one token at one position, before temperature and penalties.

    Attributes:
        token_id: the token.
        token: its text; U+FFFD where its bytes are a part of a character only.
        logprob: natural logarithm; -9999 stands for minus infinity.
        rank: 1 is the most likely token of the vocabulary.
        raw: its bytes, if they are a part of a character and the server knows them; else None.
    """

    token_id: int
    token: str
    logprob: float
    rank: int
    raw: bytes | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What the sampling options `logprobs` and `prompt_logprobs` report of one position.

    Attributes:
        chosen: the token that was generated, or is in the prompt.
        top: as many of the most likely tokens as were asked for, and the chosen one, by rank.
    """

    chosen: Logprob
    top: tuple[Logprob, ...]


class Section(msgspec.Struct, frozen=True):
    """A section of a sequence, or the part of one that a chunk has.

    Attributes:
        type: `content`, `reasoning` or `tool_call`.
        index: of the section in the sequence, from 0; the same in all its parts.
        text: without the tags of the model.
        tag: what opened it, in its first part: an end tag, its own start tag or a header.
        num_tokens: of text and tag.
    """

    type: str
    index: int
    text: str
    tag: str = ""
    num_tokens: int = 0


class Chunk(msgspec.Struct, frozen=True):
    """The next piece of one sequence.

    Attributes:
        text: what follows the text of the earlier chunks; may be empty.
        index: which of the request's `n` sequences.
        finish_reason: `stop`, `length` or `abort` on the sequence's last chunk, else None.
        stop_reason: the stop string or stop token that ended the sequence, on its last chunk; None
            unless the option `stop` is given.
        num_output_tokens: tokens in this chunk.
        num_input_tokens: tokens of the prompt.
        num_cached_tokens: those of them that were in the prefix cache; on the last chunk.
        logprobs: one per token in this chunk; None unless the option `logprobs` asks for them.
        sections: what of the text is content, reasoning and tool calls; None unless the option
            `return_sections` asks for them.
        prompt_logprobs: one per token of the prompt but the first, in the request's first chunk if
            the option `prompt_logprobs` asks for them; else None.
        embedding: of the prompt, of length 1; None unless the option `return_embedding` asks for
            it, which is all that comes then.
    """

    text: str
    index: int = 0
    finish_reason: str | None = None
    num_output_tokens: int = 0
    num_input_tokens: int = 0
    num_cached_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    sections: tuple[Section, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    stop_reason: str | int | None = None
    embedding: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One finished sequence of a request; attributes as in `Chunk`, over the whole of it."""

    text: str
    index: int = 0
    finish_reason: str | None = None
    num_output_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    sections: tuple[Section, ...] | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request.

    Attributes:
        outputs: its sequences, by index; at least one.
        num_input_tokens: tokens of the prompt.
        ttft: seconds from sending to the first chunk.
        duration: seconds from sending to the end.
        num_cached_tokens: tokens of the prompt that were in the prefix cache.
        prompt_logprobs, embedding: as in `Chunk`.
    """

    outputs: tuple[CompletionOutput, ...]
    num_input_tokens: int
    ttft: float
    duration: float
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    embedding: tuple[float, ...] | None = None

    @property
    def text(self) -> str:
        """The text of the first sequence."""
        return self.outputs[0].text

    @property
    def finish_reason(self) -> str | None:
        """Why the first sequence ended."""
        return self.outputs[0].finish_reason

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(output.num_output_tokens for output in self.outputs)


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a text.

    Attributes:
        token_ids: the tokens.
        texts: the text of each; U+FFFD where its bytes are a part of a character only.
        max_model_len: tokens of a prompt and its output that the model takes.
    """

    token_ids: tuple[int, ...]
    texts: tuple[str, ...]
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Health:
    """The state of the engine.

    Attributes:
        state: `ready` takes requests; any other word names the reason why it does not.
        detail: one sentence on that; empty if it is ready.
        num_restarts: how often its process has been started again.
        num_in_flight: requests that have been accepted and are not finished.
        tool_call_parser: the form in which the model calls tools, by the name of vLLM's parser;
            `none` if it is not known.
        has_reasoning: whether an answer may begin with reasoning.
        reasoning_switches: variables of the chat template that control it: of `enable_thinking`,
            `thinking` and `reasoning_effort`.
        takes_late_system: whether that has a place for system messages that follow others.
        do_sample: whether requests sample by default; else decoding is greedy.
        sampling_defaults: sampling parameters that the checkpoint gives for that.
        ranks: the device of each process that computes the model; empty if there is one.
    """

    state: str
    detail: str = ""
    num_restarts: int = 0
    num_in_flight: int = 0
    tool_call_parser: str = "none"
    has_reasoning: bool = False
    reasoning_switches: tuple[str, ...] = ()
    takes_late_system: bool = False
    do_sample: bool = False
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    ranks: tuple[str, ...] = ()

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""
        return self.state == "ready"
