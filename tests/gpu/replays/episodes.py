"""Replays of ragged steps: each is run several times from the same state, to the same bits.

A race between thread blocks, streams or graphs shows as bits that change from run to run, mostly
rarely, and often only while other work shares the GPU. So random requests are served on small
models that use every kernel; each step runs twice as it is served (as a CUDA graph if there is one
for it) and twice kernel by kernel, once of these beside other work on a second stream. Hidden
states, logits, tokens, log-probabilities, slot tables, token counts and the whole KV cache must be
equal.

A seed such as `gqa:17:5` names a step: the sixth of episode 17 of the model `gqa`. It determines
all requests, so that `python -m tests.gpu.replays.episodes gqa:17:5` replays the same step, often.
"""

from __future__ import annotations

import random
import shutil
import sys
import weakref
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest.mock import patch

import torch

from engine.bench.checkpoint import write_checkpoint
from engine.config.engine_config import EngineConfig
from engine.core import engine_core
from engine.core.engine_core import EngineCore
from engine.execution.loading import LoadedModel, load_model
from engine.execution.model_runner import ModelRunner
from engine.protocol.messages import AddRequest
from engine.protocol.token_ids import pack_token_ids
from engine.text.detokenizer import Detokenizer
from engine.text.load_tokenizer import load_tokenizer
from tests.gpu.replays.models import ReplayModel, models
from tests.gpu.replays.repeated_steps import RepeatedSteps

STEPS = 25  # replayed in an episode
_AGAIN = 100  # runs of a step that is replayed by its seed
_ARRIVAL, _CANCEL = 0.35, 0.1  # probabilities per step
_SHARED = 0.3  # of a prompt that it begins as another one
_OUTPUTS = (1, 2, 5, 20, 60)  # tokens
_SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "logprobs": 3},
    {"temperature": 1.2, "min_p": 0.02},
    {"temperature": 1.0, "top_n_sigma": 2.0, "typical_p": 0.8},
    {"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.2, "logprobs": 0},
    {"temperature": 1.0, "presence_penalty": 0.5, "logit_bias": {"11": 4.0}, "n": 3},
    {"temperature": 1.0, "stop_token_ids": tuple(range(100, 160)), "min_tokens": 1},
    {"temperature": 1.0, "allowed_token_ids": tuple(range(50, 90))},
)
# Of every other episode: one request that asks for more takes a step's sampling out of its graph.
_DRAWS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 1.0, "n": 3},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    {"temperature": 1.2, "min_p": 0.02},
)


class Player:
    """An engine with dummy weights, which serves one episode after the other."""

    def __init__(self, model: ReplayModel, device: torch.device) -> None:
        self._model, self._vocab = model, model.shape.vocab
        torch.set_num_threads(1)  # several processes share the cores, and their models are tiny
        folder = mkdtemp()
        weakref.finalize(self, shutil.rmtree, folder)
        write_checkpoint(model.shape, Path(folder))
        settings = {"block_size": 16, "max_num_seqs": 32, **model.settings}
        settings |= {"model": folder, "load_format": "dummy", "device": device.type}
        self._config = EngineConfig.parse(settings)
        self._loaded: LoadedModel | None = None
        self._shared: dict[str, Any] = {
            "load_model": self._load_once,
            "load_tokenizer": cache(load_tokenizer),
            "Detokenizer": cache(Detokenizer),
        }
        core = self._core()
        # What the first request with penalties allocates is part of the state.
        params = {"presence_penalty": 1.0, "max_tokens": 1}
        core.add_request(AddRequest(0, pack_token_ids([1]), params))
        while core.has_unfinished_requests():
            core.step()

    def episode(
        self, episode: int, num_steps: int = STEPS, *, again: int | None = None
    ) -> list[str]:
        """Serve random requests for `num_steps` steps, and replay each of them.

        Args:
            again: replay the step of this number very often instead, and no other.

        Returns:
            The seed of each step with results that differ, and which of them do.
        """
        core, steps, label = self._core(), self.steps, self._model.label
        steps.clear()
        requests = _Requests(random.Random(f"{label}:{episode}"), self._model, self._vocab)
        unequal: list[str] = []
        while (step := steps.num_steps) < num_steps:
            for request in requests.arriving(first=step == 0):
                core.add_request(request)
            if (uid := requests.cancelled()) is not None:
                core.abort(uid)
            if not core.has_unfinished_requests():
                core.add_request(requests.next())
            steps.repeats = 2 if again is None else _AGAIN if step == again else 1
            try:
                core.step()
                core.check_integrity()
            except Exception as error:
                raise RuntimeError(f"{label}:{episode}:{step}: {error!r}") from error
            unequal += [f"{label}:{episode}:{step}: {text}" for text in steps.take_differences()]
        steps.repeats = 1
        for uid in list(core.scheduler.unfinished):
            core.abort(uid)
        while core.has_unfinished_requests():
            core.step()
        return unequal

    def _core(self) -> EngineCore:
        """Return an engine whose host has seen no request; all of them share one model."""
        with patch.multiple(engine_core, **self._shared):
            return EngineCore(self._config)

    def _load_once(self, *arguments: Any) -> LoadedModel:
        if self._loaded is None:
            loaded = load_model(*arguments)
            assert isinstance(loaded.runner, ModelRunner)
            self.steps = RepeatedSteps(loaded.runner)
            self._loaded = replace(loaded, runner=self.steps)
        return self._loaded


class _Requests:
    """The random requests of an episode."""

    def __init__(self, draw: random.Random, model: ReplayModel, vocab: int) -> None:
        self._draw, self._model, self._vocab = draw, model, vocab
        self._prompts: list[list[int]] = []
        self._sampling = draw.choice((_SAMPLING, _DRAWS))

    def arriving(self, *, first: bool) -> list[AddRequest]:
        """Return the requests that arrive before a step, of which the first one has most."""
        draw = self._draw
        count = draw.randint(1, self._model.requests) if first else draw.random() < _ARRIVAL
        return [self.next() for _ in range(count)]

    def cancelled(self) -> int | None:
        """Return the uid of a request to be cancelled, which may have ended, or None."""
        draw = self._draw
        return draw.randint(1, len(self._prompts)) if draw.random() < _CANCEL else None

    def next(self) -> AddRequest:
        """Return a request; some begin as an earlier one, and find its blocks in the cache."""
        draw = self._draw
        prompt = draw.choices(range(self._vocab), k=round(self._model.longest ** draw.random()))
        if self._prompts and draw.random() < _SHARED:
            shared = draw.choice(self._prompts)
            shared = shared[: draw.randint(0, len(shared))]
            prompt = (shared + prompt)[: self._model.longest]
        self._prompts.append(prompt)
        params = {
            "max_tokens": draw.choice(_OUTPUTS),
            "seed": draw.randrange(2**32),
            "ignore_eos": True,
            **draw.choice(self._sampling),
        }
        return AddRequest(len(self._prompts), pack_token_ids(prompt), params)


def again(seed: str) -> int:
    """Replay one step many times, and print what differs; return 1 if something does."""
    label, episode, step = seed.split(":")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    player = Player(models(tiny=device.type == "cpu")[label], device)
    unequal = player.episode(int(episode), int(step) + 1, again=int(step))
    print("\n".join(unequal) or f"{seed}: {_AGAIN} runs gave the same bits")
    return int(bool(unequal))


if __name__ == "__main__":
    sys.exit(again(sys.argv[1]))
