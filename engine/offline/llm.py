"""LLM: the offline API, prompts in and completions out, with continuous batching."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from engine.config.engine_config import EngineConfig
from engine.console import Console
from engine.errors import RequestError, TridentError, UnknownParameterError
from engine.offline.outputs import (
    CompletionOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestOutput,
)
from engine.protocol.messages import AddRequest, SequenceOutput, TokenLogprobs
from engine.protocol.prompt_logprobs import positions
from engine.protocol.token_ids import pack_token_ids
from engine.ranks.leader import start_core
from engine.request.prompts import Messages, Prompt, TokenizedPrompt, cut, rendered, tokenized
from engine.request.sampling_params import SamplingParams
from engine.text.chat_parameters import ChatParameters
from engine.text.output_parsing.chunk_parser import ChunkParser
from engine.validation import unsupported


@contextmanager
def loading(model: str) -> Iterator[Callable[[str], None]]:
    """Show loading progress on stderr, if a terminal; yields the function that reports it."""
    with Console(stderr=True).status(f"loading {escape(model)}", spinner="line") as status:
        yield lambda text: status.update(escape(text))


@contextmanager
def progress(total: int, *, enabled: bool) -> Iterator[Any]:
    """Show a bar on stderr; yields the function that advances it by one sequence."""
    with Progress(
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not enabled,
    ) as progress:
        task = progress.add_task("generating", total=total)
        yield lambda: progress.advance(task)


class LLM:
    """A model in this process, without a server.

    Example:
        >>> llm = LLM(model="demo")
        >>> llm.chat([{"role": "user", "content": "What is 2 + 3?"}])[0].outputs[0].text
    """

    def __init__(self, model: str | os.PathLike[str] = "demo", **settings: Any) -> None:
        """Load `model`, a folder, a hub id or `demo`; `settings` are fields of `EngineConfig`.

        Raises:
            ConfigError, CheckpointError, InsufficientMemoryError: with what to do about it.
        """
        config = EngineConfig.parse({"model": model, **settings})
        # Offline, all prompts are added at once: the queue must hold the caller's whole list.
        unbounded = {"max_num_queued_reqs": 2**31, "max_num_queued_tokens": 2**62}
        with loading(config.model) as report:
            self._core = start_core(config.model_copy(update=unbounded), report)
        self._chunk_parser = ChunkParser(self._core.detokenizer, self._core.parser_spec)
        self._next_uid = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        cache_salt: str | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Complete texts or lists of token ids; returns results in the order of the prompts.

        Args:
            prompts: one or several; also as objects with `prompt` or `prompt_token_ids`, and a
                `cache_salt` of their own.
            sampling_params: one for all prompts, or one per prompt; by default the checkpoint's
                own generation settings.
            use_tqdm: show a progress bar.
            cache_salt: only calls with the same salt share cached prefixes.
            others: arguments of vLLM that Trident does not have, with values that ask for nothing.

        Raises:
            ValueError: a prompt or parameter is wrong; no prompt has been run.
            TridentError: a prompt failed while it ran, or its grammar cannot be compiled (a
                `RequestError`); all others have been aborted.
        """
        _refuse(others)
        many = tokenized(self._core.tokenizer, prompts, cache_salt)
        return self._completed(many, sampling_params, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        *,
        truncate_prompt_tokens: int | None = None,
        cache_salt: str | None = None,
        **others: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt: its last hidden state, scaled to the length 1.

        Arguments and errors are those of `generate`, and of `SamplingParams`.
        """
        _refuse(others)
        many = tokenized(self._core.tokenizer, prompts, cache_salt)
        params = [
            SamplingParams(return_embedding=True, truncate_prompt_tokens=truncate_prompt_tokens)
        ] * len(many)
        many = cut(many, params, self._core.ready.max_model_len)
        rows = self._run(many, params, use_tqdm)
        return [
            EmbeddingRequestOutput.of(row, prompt.token_ids)
            for prompt, (row,) in zip(many, rows, strict=True)
        ]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        chat_template: str | None = None,
        cache_salt: str | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several; each is a list of {"role", "content"} messages.

        Args:
            add_generation_prompt: open the assistant's answer; by default unless
                `continue_final_message`, which leaves the last message open instead.
            tools: functions that the model may call, in OpenAI's form.
            chat_template_kwargs: variables of the chat template, as `enable_thinking`.
            chat_template: the source of one in place of the checkpoint's.

        The other arguments are those of `generate`.

        Raises:
            ValueError: a conversation is malformed, the checkpoint has no chat template, or that
                has no place for an argument.
        """
        _refuse(others)
        parameters = ChatParameters.of(
            {
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message,
                "tools": tools,
                "chat_template_kwargs": chat_template_kwargs,
            }
        )
        tokenizer = self._core.tokenizer
        if chat_template is not None:
            if not isinstance(chat_template, str):
                raise RequestError("must be a string", param="chat_template")
            tokenizer = tokenizer.with_chat_template(chat_template)
        many = rendered(tokenizer, messages, parameters, cache_salt)
        return self._completed(many, sampling_params, use_tqdm)

    def get_tokenizer(self) -> Any:
        """Return the tokenizer, that of transformers."""
        return self._core.tokenizer.hf_tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the checkpoint's own generation settings."""
        return SamplingParams.parse(
            {}, defaults=self._core.generation_defaults.sampling_defaults({})
        )

    @property
    def num_blocks(self) -> int:
        """KV blocks that sequences can hold."""
        return self._core.scheduler.kv_cache.pool.num_usable

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that no sequence holds; all of them between calls."""
        return self._core.scheduler.kv_cache.pool.num_free

    def check_integrity(self) -> None:
        """Assert that no block is lost and no reference is left over."""
        self._core.check_integrity()

    def _completed(
        self,
        prompts: list[TokenizedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        show_progress: bool,
    ) -> list[RequestOutput]:
        params = self._params_for(len(prompts), sampling_params)
        prompts = cut(prompts, params, self._core.ready.max_model_len)
        finished = self._run(prompts, params, show_progress)
        return [self._output(*each) for each in zip(prompts, finished, params, strict=True)]

    def _run(
        self, prompts: list[TokenizedPrompt], params: list[SamplingParams], show_progress: bool
    ) -> list[list[SequenceOutput]]:
        """Return the last outputs of the sequences of each prompt."""
        uids = range(self._next_uid, self._next_uid + len(prompts))
        self._next_uid = uids.stop
        finished: dict[int, list[SequenceOutput]] = {uid: [] for uid in uids}
        try:
            for uid, prompt, sampling in zip(uids, prompts, params, strict=True):
                message = AddRequest(
                    uid=uid,
                    prompt_token_ids=pack_token_ids(prompt.token_ids, "input_ids"),
                    sampling_params=sampling.model_dump(exclude_defaults=True),
                    stream=False,
                    cache_salt=prompt.cache_salt,
                )
                try:
                    self._core.add_request(message)
                except RequestError as error:
                    raise _of_prompt(uids.index(uid), error) from None
            with progress(sum(p.n for p in params), enabled=show_progress) as advance:
                while self._core.has_unfinished_requests():
                    outputs = self._core.step()
                    for failed in outputs.failures:
                        raise _of_prompt(uids.index(failed.uid), TridentError.of(failed.error))
                    for output in outputs.rows():
                        finished[output.uid].append(output)
                        advance()
        except BaseException:
            # Refused or interrupted: the next call must find an empty engine.
            for uid in uids:
                self._core.abort(uid)
            raise
        return [*finished.values()]

    def _params_for(
        self, count: int, sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if sampling_params is None:
            return [self.get_default_sampling_params()] * count
        if isinstance(sampling_params, SamplingParams):
            return [sampling_params] * count
        if not isinstance(sampling_params, Sequence) or not all(
            isinstance(each, SamplingParams) for each in sampling_params
        ):
            raise RequestError(
                "must be `SamplingParams`, or a list of them", param="sampling_params"
            )
        if len(sampling_params) != count:
            raise RequestError(
                f"{len(sampling_params)} given for {count} prompts; give one, or one per prompt",
                param="sampling_params",
            )
        return list(sampling_params)

    def _output(
        self, prompt: TokenizedPrompt, outputs: list[SequenceOutput], params: SamplingParams
    ) -> RequestOutput:
        outputs.sort(key=lambda output: output.index)
        assert outputs[0].stats is not None
        scores = outputs[0].prompt_logprobs
        return RequestOutput(
            request_id=str(outputs[0].uid),
            prompt=prompt.text,
            prompt_token_ids=prompt.token_ids,
            outputs=[self._completion(output, params) for output in outputs],
            prompt_logprobs=(
                None
                if scores is None
                else [None, *(self._logprobs(position) for position in positions(scores))]
            ),
            metrics=outputs[0].stats,
        )

    def _completion(self, output: SequenceOutput, params: SamplingParams) -> CompletionOutput:
        assert output.finish_reason is not None
        skip = params.skip_special_tokens
        return CompletionOutput(
            index=output.index,
            text=self._core.detokenizer.text(
                output.window_ids,
                output.token_ids,
                output,
                skip_special_tokens=skip,
            ),
            token_ids=output.token_ids,
            cumulative_logprob=output.cumulative_logprob,
            logprobs=(
                None
                if output.logprobs is None
                else [self._logprobs(position) for position in output.logprobs]
            ),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            sections=(
                self._chunk_parser.read(
                    output.window_ids, output.token_ids, output, skip_special_tokens=skip
                )
                if params.return_sections
                else None
            ),
        )

    def _logprobs(self, position: TokenLogprobs) -> dict[int, Logprob]:
        return {
            token_id: Logprob(logprob, rank, self._core.tokenizer.token_text(token_id))
            for token_id, logprob, rank in zip(
                position.token_ids, position.logprobs, position.ranks, strict=True
            )
        }


def _of_prompt(index: int, error: TridentError) -> TridentError:
    """Return `error` with the index of the prompt that it is about."""
    return error.reworded(str(error), param=f"prompt {index}")


def _refuse(others: Mapping[str, Any]) -> None:
    for name in unsupported.without(dict(others), unsupported.ARGUMENTS):
        raise UnknownParameterError("unknown argument", param=name)
