"""The tokenizer stage: from a client's inputs to a validated request for the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.checkpoint.hub import resolve_checkpoint
from engine.config.engine_config import EngineConfig
from engine.errors import ContextLengthError, RequestError
from engine.models.registry import read_model_spec
from engine.protocol.messages import ResponseOptions
from engine.protocol.token_ids import TokenIds, token_array
from engine.request.generation_defaults import GenerationDefaults
from engine.request.prompts import truncated
from engine.request.sampling_params import SamplingParams
from engine.service.sampling_inputs import end_fields, renamed
from engine.service.stages.request_inputs import RequestInputs
from engine.service.stages.tokenized_request import TokenizedRequest
from engine.text.chat_parameters import ChatParameters
from engine.text.chat_template import parse_messages, render_text
from engine.text.detokenizer import Detokenizer
from engine.text.load_tokenizer import load_tokenizer
from engine.text.tokenizer import Tokenizer
from engine.validation.checks import check_token_ids
from engine.validation.limits import (
    MAX_ABSOLUTE_LOGIT_BIAS,
    MAX_LOGIT_BIAS,
    check_length,
    check_messages_json,
    check_size,
    max_prompt_characters,
)

DEFAULT_MAX_TOKENS = 16  # of a completion, as OpenAI's; a chat may fill the context
_MEAN_CHARACTERS = 4  # of a token
_CERTAINLY_TOO_LONG = 1.25


class Preprocessor:
    """Tokenises prompts and validates sampling parameters. Immutable.

    Attributes:
        max_model_len: tokens of a prompt and its output.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        defaults: GenerationDefaults,
        *,
        max_model_len: int,
        vocab_size: int,
    ) -> None:
        """`vocab_size` is the model's, which may exceed the tokenizer's."""
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._defaults = defaults
        self.max_model_len = max_model_len
        self._vocab_size = vocab_size

    @classmethod
    def from_config(cls, config: EngineConfig, tokenizer: Tokenizer | None = None) -> Preprocessor:
        """Read what `config` names.

        Args:
            config: the settings.
            tokenizer: that of these settings, if it has been loaded.

        Raises:
            TridentError: there is no such checkpoint, or its tokenizer or config is broken.
        """
        checkpoint = resolve_checkpoint(config.model, weights=False)
        tokenizer = tokenizer or load_tokenizer(config, checkpoint)
        model = read_model_spec(checkpoint, config.hf_overrides)
        defaults = GenerationDefaults.from_checkpoint(
            checkpoint, tokenizer, model.vocab_size, config
        )
        return cls(
            tokenizer,
            defaults,
            max_model_len=config.max_model_len or model.context_length,
            vocab_size=model.vocab_size,
        )

    def __call__(
        self, inputs: RequestInputs, arrival_time: float | None = None
    ) -> TokenizedRequest:
        """Turn `inputs` into a request for the engine.

        Args:
            inputs: of the request.
            arrival_time: when it entered this stage, a `time.monotonic()` second: its deadline
                counts from there. None: from when it reaches the engine.

        Raises:
            RequestError: the prompt is empty or too long, or a sampling parameter is wrong.
        """
        if inputs.end_id is not None and inputs.end_id != -1:
            check_token_ids("end_id", {inputs.end_id}, self._vocab_size)
        params = self._sampling_params(inputs)
        field, prompt, input_ids = self._prompt(inputs, params)
        asked = params.max_tokens if "max_tokens" in inputs.fields else None
        try:
            check_length(field, len(input_ids), asked, self.max_model_len)
        except RequestError as error:
            raise renamed(error, inputs.names) from None
        if asked is None and params.max_tokens is not None:
            room = self.max_model_len - len(input_ids)
            params = params.model_copy(update={"max_tokens": min(params.max_tokens, room)})
        return TokenizedRequest(
            input_ids=input_ids,
            sampling_params=params,
            stream=inputs.stream,
            priority=inputs.priority,
            cache_salt=inputs.cache_salt,
            tenant=inputs.tenant,
            timeout_us=inputs.timeout_us,
            options=ResponseOptions(
                outputs=[
                    *inputs.outputs,
                    *(["sequence_index"] if params.n > 1 else []),
                    *(["sections"] if params.return_sections else []),
                    *(["embedding"] if params.return_embedding else []),
                ],
                text_prefix=prompt() if _wants_prompt(inputs, params) else "",
                arrival_time=arrival_time,
            ),
        )

    def tokenize(
        self,
        text: str | None,
        messages: str | None,
        chat: ChatParameters,
        *,
        add_special_tokens: bool | None,
    ) -> TokenIds:
        """Return the tokens of a prompt, which may be longer than the model takes.

        Args:
            text: the prompt, or None.
            messages: chat messages instead; JSON.
            chat: what the chat template gets beside the messages.
            add_special_tokens: those that start a prompt; None: for a text, as in a request.

        Raises:
            RequestError: it is much too long, or wrong.
        """
        if messages is None:
            assert text is not None
            return self._encode("text_input", text, add_special_tokens is not False)
        return self._encode("messages", self._rendered(messages, chat), bool(add_special_tokens))

    def token_texts(self, token_ids: TokenIds) -> list[str]:
        """Return the text of each token; bytes that are no character become U+FFFD."""
        return [self._tokenizer.token_text(token_id) for token_id in token_ids.tolist()]

    def detokenize(self, token_ids: TokenIds) -> str:
        """Return the text of tokens, special ones included.

        Raises:
            RequestError: an id is outside the vocabulary, or there are too many.
        """
        limit = max_prompt_characters(self.max_model_len)
        check_size("input_ids", len(token_ids), limit, "elements")
        check_token_ids("input_ids", token_ids, self._vocab_size)
        return self._tokenizer.decode(token_ids.tolist(), False)

    def _sampling_params(self, inputs: RequestInputs) -> SamplingParams:
        max_tokens = DEFAULT_MAX_TOKENS if inputs.messages is None else None
        fields = {"max_tokens": max_tokens, **inputs.fields}
        try:
            params = SamplingParams.parse(fields, defaults=self._defaults.sampling_defaults(fields))
        except RequestError as error:
            raise renamed(error, inputs.names) from None
        return params.model_copy(
            update={**end_fields(inputs.end_id, params), **self._bias(inputs, params)}
        )

    def _prompt(
        self, inputs: RequestInputs, params: SamplingParams
    ) -> tuple[str, Callable[[], str], TokenIds]:
        """Return as `_whole_prompt` does, with what `truncate_prompt_tokens` leaves."""
        cuts = params.truncate_prompt_tokens is not None
        field, text, input_ids = self._whole_prompt(inputs, cuts)
        kept = truncated(input_ids, params, self.max_model_len)
        if len(kept) < len(input_ids):
            return field, lambda: self._text(kept), kept
        return field, text, input_ids

    def _whole_prompt(
        self, inputs: RequestInputs, cuts: bool
    ) -> tuple[str, Callable[[], str], TokenIds]:
        """Return the name of the input that has the prompt, its text, and its tokens.

        If it `cuts` the prompt, that may have more tokens than the model takes.
        """
        if (ids := inputs.input_ids) is not None:
            check_token_ids("input_ids", ids, self._vocab_size)
            # The text is costly, and hardly ever wanted.
            return "input_ids", lambda: self._text(ids), ids
        if (text := inputs.text) is not None:
            return "text_input", lambda: text, self._encode("text_input", text, True, cuts)
        assert inputs.messages is not None
        rendered = self._rendered(inputs.messages, inputs.chat)
        # A chat template writes the special tokens itself.
        return "messages", lambda: rendered, self._encode("messages", rendered, False, cuts)

    def _text(self, ids: TokenIds) -> str:
        """Return the text of a prompt, but for a character that its output may complete."""
        window = self._detokenizer.prompt_window(ids, skip_special_tokens=False)
        begun = self._detokenizer.delta(window, [], final=True, skip_special_tokens=False)
        return self._tokenizer.decode(ids.tolist(), False).removesuffix(begun)

    def _rendered(self, messages: str, chat: ChatParameters) -> str:
        check_messages_json(messages, self.max_model_len)
        return render_text(self._tokenizer, parse_messages(messages), chat)

    def _encode(self, field: str, prompt: str, special: bool, cuts: bool = False) -> TokenIds:
        self._check_characters(field, prompt, cuts)
        ids = self._tokenizer.encode(prompt, add_special_tokens=special, field=field)
        if not ids:
            raise RequestError("must hold at least one token", param=field)
        return token_array(field, ids)

    def _check_characters(self, field: str, prompt: str, cuts: bool) -> None:
        """Refuse most prompts that are too long without tokenising all of them."""
        limit = max_prompt_characters(self.max_model_len)
        if len(prompt) > limit:
            raise ContextLengthError(
                f"the prompt of {len(prompt)} characters cannot fit into max_model_len "
                f"({self.max_model_len} tokens); at most {limit} are allowed",
                param=field,
                more_than=self.max_model_len,
                max_model_len=self.max_model_len,
            )
        start = prompt[: _MEAN_CHARACTERS * self.max_model_len]
        if not cuts and len(prompt) > _CERTAINLY_TOO_LONG * len(start):
            num_tokens = len(self._tokenizer.encode(start, field=field))
            # Where the text is cut, a few tokens differ from those of the whole.
            if num_tokens > _CERTAINLY_TOO_LONG * self.max_model_len:
                raise ContextLengthError(
                    f"the prompt has more than {num_tokens} tokens; max_model_len is "
                    f"{self.max_model_len}",
                    param=field,
                    more_than=num_tokens,
                    max_model_len=self.max_model_len,
                )

    def _bias(self, inputs: RequestInputs, params: SamplingParams) -> Mapping[str, Any]:
        """Return `logit_bias` with the weights of the embedding bias words' tokens added.

        Of a token that is in several words the sum is limited as each of them is.
        """
        if not inputs.embedding_bias:
            return {}
        bias, most = dict(params.logit_bias or {}), MAX_ABSOLUTE_LOGIT_BIAS
        for word, weight in inputs.embedding_bias:
            if abs(weight) > most:
                raise RequestError(
                    f"must be {-most:g} to {most:g} (got {weight:g})",
                    param="embedding_bias_weights",
                )
            for token_id in self._tokenizer.encode(
                word, add_special_tokens=False, field="embedding_bias_words"
            ):
                total = bias.get(token_id, 0.0) + weight
                bias[token_id] = min(max(total, -most), most)
        check_size("embedding_bias_words", len(bias), MAX_LOGIT_BIAS, "different tokens")
        return {"logit_bias": bias}


def _wants_prompt(inputs: RequestInputs, params: SamplingParams) -> bool:
    """Whether to echo the prompt: like vllm_backend by default unless streamed; never for chats.

    Nor where its embedding is all that is wanted.
    """
    if params.return_embedding:
        return False
    if inputs.exclude_input_in_output is not None:
        return not inputs.exclude_input_in_output
    return not inputs.stream and inputs.text is not None
