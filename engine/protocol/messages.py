"""Typed messages between the stages: engine stub <-> engine process, and engine -> detokenizer.

All are msgpack through msgspec. The socket between stub and process carries length-prefixed
frames (see `engine.protocol.channel`); the detokenizer gets one `DetokenizerInput` per response.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec

from engine.errors import ErrorReport
from engine.protocol.token_ids import TOKEN_ID_BYTES

# Bounds are checked where a message is decoded: any client may send `ResponseOptions`.
Int32 = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=2**32)]


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one output position, before temperature and penalties.

    The chosen token comes first, then the most likely ones in order (the chosen one may recur).
    """

    token_ids: list[Int32]
    logprobs: list[float]
    ranks: list[Int32]  # 1 is the most likely token


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of the tokens of a prompt, all P but the first, as little-endian bytes.

    `engine.protocol.prompt_logprobs` packs and unpacks them.
    """

    token_ids: bytes  # int32 [P - 1]
    logprobs: bytes  # float32 [P - 1]
    ranks: bytes  # int32 [P - 1]
    top_token_ids: bytes  # int32 [P - 1, N], the most likely tokens at each position, in order
    top_logprobs: bytes  # float32 [P - 1, N]


class RequestStats(msgspec.Struct, frozen=True, array_like=True):
    """Figures of one finished sequence. Times are seconds of `time.monotonic()`."""

    num_prompt_tokens: Int32
    num_cached_tokens: Int32  # prompt tokens whose KV came from the prefix cache
    num_output_tokens: Int32
    num_preemptions: Int32
    arrival_time: Seconds
    first_scheduled_time: Seconds
    first_token_time: Seconds
    finished_time: Seconds
    num_draft_tokens: Int32 = 0  # guesses of tokens
    num_accepted_draft_tokens: Int32 = 0  # those of them that were right


# ---- stub -> engine process -----------------------------------------------------------------


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The first message: load the model. Answers: `Starting`..., then `Ready` or `StartFailed`."""

    config: dict[str, Any]  # EngineConfig.model_dump()


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    """One prompt to complete; answered by `Outputs` for `uid` until each sequence has finished."""

    uid: int
    prompt_token_ids: bytes  # int32, by `engine.protocol.token_ids.pack_token_ids`
    sampling_params: dict[str, Any]  # SamplingParams.model_dump(exclude_defaults=True)
    priority: int = 0  # smaller runs earlier, with scheduling_policy=priority
    # Arrival at the stub, in seconds of `time.monotonic()`: the same clock in all processes.
    arrival_time: float = msgspec.field(default_factory=time.monotonic)
    timeout_s: float | None = None  # from arrival; then the sequences finish with "abort"
    stream: bool = True  # False: one output per sequence, when it has finished
    request_id: str = ""  # given by the client, for logs
    cache_salt: str = ""  # only requests with the same salt share cached prefixes
    tenant: str = ""  # shares the slots equally with the others


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End a request with "abort" and free its blocks. Unknown or finished uids are ignored."""

    uid: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End the engine process; running requests are aborted."""


# ---- engine process -> stub -----------------------------------------------------------------


class Starting(msgspec.Struct, frozen=True, tag="starting"):
    """Progress of the engine process before it is ready, as a sentence for the log."""

    text: str


FOR_EMBEDDINGS = "; for embeddings"  # ends the description of a model that gives no answers


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine is ready for requests."""

    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    kv_cache_tokens: int  # for which there are blocks, in sequences of full length
    max_num_seqs: int
    description: str  # one line: model, dtype, device, KV cache size, limits of a step
    tool_call_parser: str = "none"  # the form of tool calls, by the name of vLLM's parser
    has_reasoning: bool = False
    reasoning_switches: list[str] = []  # variables of the chat template
    takes_late_system: bool = False  # whether that has a place for system messages after others
    do_sample: bool = False  # what requests get that name no sampling parameters
    sampling_defaults: dict[str, float] = {}  # of the checkpoint, beside that
    computes_on_cpu: bool = False  # on the cores that the stages run on
    ranks: list[str] = []  # the device of each, where several processes compute the model


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """The process is alive. Sent by its own thread every `HEARTBEAT_INTERVAL_S`, from the start.

    `iteration_s` shows whether the engine's loop is stuck.
    """

    iteration_s: float  # seconds that the loop's iteration has taken so far; 0 while it waits


class StartFailed(msgspec.Struct, frozen=True, tag="start_failed"):
    """The engine could not start; the process exits."""

    error: ErrorReport


class OutputDetails(msgspec.Struct, frozen=True, array_like=True):
    """Rare fields of a sequence's output beside new tokens; most outputs have none."""

    finish_reason: str | None = None  # "stop", "length", "abort"; None while it runs
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it
    text_cut: Int32 = 0  # characters to drop from the end of the final text: a stop string
    omit_stop_token: bool = False  # the last token is a stop token, left out of the text
    logprobs: list[TokenLogprobs] | None = None  # one per new token, if asked for
    cumulative_logprob: float | None = None
    stats: RequestStats | None = None  # with the finish_reason
    # `ParserState` where the new tokens begin, if `return_sections` asked for it.
    parser_state: tuple[Int32, Int32] = (0, 0)
    prompt_logprobs: PromptLogprobs | None = None  # with a request's first output, if asked for
    embedding: bytes | None = None  # float32, little-endian, of length 1; if asked for


NO_DETAILS = OutputDetails()


class SequenceOutput(msgspec.Struct, frozen=True):
    """One row of `engine.protocol.step_outputs.StepOutputs` as an object; no message.

    Fields as there and in `OutputDetails`.
    """

    uid: int
    index: int  # which of the request's `n` sequences
    token_ids: list[int]
    window_ids: list[int]  # tokens before `token_ids`, the context needed to decode these
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    text_cut: int = 0
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    stats: RequestStats | None = None
    omit_stop_token: bool = False
    parser_state: tuple[int, int] = (0, 0)
    prompt_logprobs: PromptLogprobs | None = None
    embedding: bytes | None = None


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """The rows of `engine.protocol.step_outputs.StepOutputs`: its arrays as little-endian bytes."""

    uids: bytes  # int64; the others int32
    indexes: bytes
    num_tokens: bytes
    num_window_tokens: bytes
    token_ids: bytes
    window_ids: bytes
    details: dict[int, OutputDetails] = {}


class RequestFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine refused or failed one request; no more messages follow for `uid`."""

    uid: int
    error: ErrorReport


class HistogramDelta(msgspec.Struct, frozen=True, array_like=True):
    """Observations of one histogram since the last report; its bounds are in `engine.core.stats`.

    `counts[i]` is the count of bucket i (not cumulative); the last bucket is above all bounds.
    """

    counts: list[int]
    sum: float


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    """Gauges now, and counters since the last `Stats`. Of sequences, not requests.

    Sent a few times per second while it is busy, and once when it falls idle.
    """

    num_running: int  # now, like the next two fields
    num_waiting: int
    kv_cache_usage: float  # 0..1
    # Of the layer where it is highest: choices of the busiest expert, over the mean of its experts.
    expert_imbalance: float = 0.0
    num_state_checkpoints: int = 0  # now, of layers that keep states
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    num_prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    num_prefix_hits: int = 0  # prompt tokens found there
    num_prefix_lost: int = 0  # prompt tokens whose KV was there, but no state behind them
    num_drafts: int = 0  # draft sequences, each of one or more tokens
    num_draft_tokens: int = 0  # tokens of the drafts
    num_accepted_tokens: int = 0  # draft tokens that were accepted
    num_finished: dict[str, int] = {}  # by finish reason
    histograms: dict[str, HistogramDelta] = {}  # by name, those with observations
    rank_waits_s: list[float] = []  # by rank, for the others within steps; empty for one process


class EngineFailed(msgspec.Struct, frozen=True, tag="engine_failed"):
    """The engine is of no use any more; the process ends.

    Attributes:
        reason: what has happened.
        is_own_fault: something crashed or hung, rather than was killed from outside.
    """

    reason: str
    is_own_fault: bool


ToEngine = Start | AddRequest | Abort | Shutdown
FromEngine = (
    Starting | Ready | Heartbeat | StartFailed | Outputs | RequestFailed | Stats | EngineFailed
)


# ---- tokenizer -> engine stub ---------------------------------------------------------------


# In `outputs`: the output `logprobs` with "null" in place of log-probabilities, which vllm_backend
# sends if a request has `return_logprobs` but no `logprobs`.
NULL_LOGPROBS = "null_logprobs"


class ResponseOptions(msgspec.Struct, frozen=True, array_like=True):
    """Options of an ensemble request for the engine stub, beside the engine's inputs."""

    outputs: list[str] = []  # optional output tensors that the request asked for
    text_prefix: str = ""  # precedes the text of each sequence: the prompt, if it is to be echoed
    arrival_time: Seconds | None = None  # at the tokenizer stage, by `time.monotonic()`


# ---- engine stub -> detokenizer -------------------------------------------------------------


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one sequence, with what a stateless detokenizer needs to decode them.

    Ids are int32, packed by `engine.protocol.token_ids.pack_token_ids`.
    """

    index: Int32
    window_ids: bytes
    token_ids: bytes
    details: OutputDetails = NO_DETAILS
    text_prefix: str = ""  # the echoed prompt, on a sequence's first chunk

    @property
    def num_tokens(self) -> int:
        """Number of new tokens."""
        return len(self.token_ids) // TOKEN_ID_BYTES


class DetokenizerInput(msgspec.Struct, frozen=True, array_like=True):
    """Everything the detokenizer needs for one response; it keeps no state between responses.

    With `error` the response is that. Errors of ensemble requests are sent this way
    because an error that overtakes a chunk in the detokenizer ends the ensemble's request while a
    step of it is in flight: release 24.10 never releases such a request, and loses the chunk's
    text.

    Signed by `engine.service.link`: the detokenizer refuses messages that the engine did not make.
    """

    uid: int
    chunks: list[Chunk]
    last: bool = False  # no other response of the request follows
    # Ask Triton whether the client cancelled: a round trip, so not with every response.
    check_cancelled: bool = False
    number: int = 0  # sequence number to acknowledge to the engine stub; 0: none
    skip_special_tokens: bool = True
    outputs: list[str] = []  # as in `ResponseOptions`
    error: ErrorReport | None = None
