"""A random checkpoint with prompts, and transformers' greedy continuations."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from engine import LLM, RequestOutput, SamplingParams
from tests.factories.checkpoints import write_checkpoint
from tests.factories.exact import ExactModel, cached_logits, decoded_logits, max_error
from tests.factories.tokenizers import byte_level_tokenizer

VOCAB = 400
# Parallel tests share a GPU.
SHARED_GPU = {"kv_cache_memory_bytes": 64 << 20}
_COMMON = 20  # length of the prefix that all longer prompts share


@dataclass(frozen=True)
class Answer:
    """A greedy continuation of a prompt, of n tokens.

    Attributes:
        top_token_ids: [n, 2], the two most likely tokens at each position; the first is chosen.
        logprobs: float64 [n, 2], of these in float64.
        max_error: bound on a float32 log-probability's error, from that of transformers' model.
    """

    top_token_ids: Tensor
    logprobs: Tensor
    max_error: float

    @property
    def token_ids(self) -> list[int]:
        """The continuation."""
        token_ids: list[int] = self.top_token_ids[:, 0].tolist()
        return token_ids


class GreedyReference:
    """Transformers' `model` in float32, and in float64."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._exact = ExactModel(model)

    def answer(self, prompt: list[int], max_tokens: int, eos: int | None = None) -> Answer | None:
        """Continue `prompt` up to `max_tokens`, or the first `eos`.

        Returns None if rounding could change the two most likely tokens or their order: at a tie,
        either is correct.
        """
        token_ids = list(prompt)
        with torch.inference_mode():
            new, cache = torch.tensor([prompt]), DynamicCache(config=self._model.config)
            while len(token_ids) < len(prompt) + max_tokens and token_ids[len(prompt) :][-1:] != [
                eos
            ]:
                new = cached_logits(self._model, new, cache)[:, -1:].argmax(dim=-1)
                token_ids.append(int(new))
        theirs = decoded_logits(self._model, token_ids[:-1], len(prompt)).log_softmax(dim=-1)
        exact = self._exact.logits(token_ids[:-1], len(prompt)).log_softmax(dim=-1)
        tolerance = max_error(theirs, exact)
        values, top_token_ids = exact[len(prompt) - 1 :].topk(3)
        if (values[:, :-1] - values[:, 1:]).min() <= 2 * tolerance:
            return None
        return Answer(top_token_ids[:, :2], values[:, :2], tolerance)

    def draw(
        self, draw_prompt: Callable[[], list[int]], max_tokens: int, eos: int | None = None
    ) -> tuple[list[int], Answer]:
        """Return the first prompt drawn that has an answer, with the answer."""
        while True:
            prompt = draw_prompt()
            answer = self.answer(prompt, max_tokens, eos)
            if answer is not None:
                return prompt, answer


def check_answer(output: RequestOutput, answer: Answer) -> None:
    """Assert that a greedy output with log-probabilities of one or two tokens is `answer`."""
    completion = output.outputs[0]
    assert completion.token_ids == answer.token_ids
    assert completion.logprobs is not None
    num_top = len(completion.logprobs[0])
    assert [list(position) for position in completion.logprobs] == answer.top_token_ids[
        :, :num_top
    ].tolist()
    found = [[entry.logprob for entry in position.values()] for position in completion.logprobs]
    error = (torch.tensor(found) - answer.logprobs[:, :num_top]).abs().max()
    assert error <= answer.max_error


class GreedyCheckpoint:
    """A random model in float32, prompts, and transformers' answers to each of them alone.

    Args:
        path: the folder to write it to.
        lengths: of the prompts; those of more than 20 tokens share a prefix.
        max_tokens: of each answer.
        settings: of the configuration.
    """

    def __init__(
        self,
        path: Path,
        architecture: str,
        *,
        lengths: Sequence[int],
        max_tokens: int,
        rope: str = "default",
        vocab_size: int = VOCAB,
        **settings: Any,
    ) -> None:
        self.path = path
        self.model = write_checkpoint(
            path, architecture, rope=rope, vocab_size=vocab_size, **settings
        )
        byte_level_tokenizer().save_pretrained(path)
        draw = random.Random(0)
        common = draw.choices(range(3, vocab_size), k=_COMMON)
        reference = GreedyReference(self.model)
        self.prompts: list[list[int]] = []
        self.answers: list[Answer] = []
        for length in lengths:
            prefix = common if length > _COMMON else []
            rest = partial(draw.choices, range(3, vocab_size), k=length - len(prefix))
            prompt, answer = reference.draw(lambda p=prefix, r=rest: p + r(), max_tokens)
            self.prompts.append(prompt)
            self.answers.append(answer)
        self.sampling = SamplingParams(
            temperature=0, max_tokens=max_tokens, logprobs=2, ignore_eos=True
        )

    def llm(self, device: torch.device, **settings: Any) -> LLM:
        """Return an engine for it on `device`, in float32 unless `settings` override it."""
        fields = {"device": device.type, "dtype": "float32", **SHARED_GPU, **settings}
        return LLM(str(self.path), **fields)

    def check(self, outputs: Sequence[RequestOutput], llm: LLM) -> None:
        """Assert that `outputs` equal transformers' answers, and that `llm` has leaked no block."""
        for output, answer in zip(outputs, self.answers, strict=True):
            check_answer(output, answer)
        check_blocks(llm)


def check_blocks(llm: LLM) -> None:
    """Assert that all blocks are free, and accounted for."""
    llm.check_integrity()
    assert llm.num_free_blocks == llm.num_blocks
