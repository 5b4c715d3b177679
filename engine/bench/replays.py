"""Replays of ragged steps: each is run several times from the same state, to the same bits.

A race between thread blocks, streams or graphs shows as bits that change from run to run, mostly
rarely, and often only while other work shares the GPU. So random requests are served on small
models that use every kernel; each step runs twice as it is served (as a CUDA graph if there is one
for it) and twice kernel by kernel, once of these beside other work on a second stream. Hidden
states, logits, tokens, log-probabilities, slot tables, token counts and the whole KV cache must be
equal.

A seed such as `gqa:17:5` names a step: the sixth of episode 17 of the model `gqa`. It determines
all requests, so that the same step is replayed in another process.
"""

from __future__ import annotations

import copy
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from engine.bench.checkpoint import write_checkpoint
from engine.bench.part import Figures, Part
from engine.bench.parts import Group
from engine.bench.repeated_steps import RepeatedSteps
from engine.bench.replay_models import models
from engine.bench.shapes import Shape
from engine.bench.workload import FULL, Workload
from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.execution.model_runner import ModelRunner
from engine.protocol import AddRequest
from engine.token_ids import pack_token_ids

STEPS = 25  # replayed in an episode
_TINY_STEPS = 5
_EPISODES = 10  # in a part
_PROCESSES = 2  # per model
_AGAIN = 100  # runs of a step that is replayed by its seed
_ARRIVAL, _CANCEL = 0.35, 0.1  # probabilities per step
_OUTPUTS = (1, 2, 5, 20, 60)  # tokens
_SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "logprobs": 3},
    {"temperature": 1.2, "min_p": 0.02},
    {"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.2, "logprobs": 0},
    {"temperature": 1.0, "presence_penalty": 0.5, "logit_bias": {"11": 4.0}, "n": 3},
    {"temperature": 1.0, "stop_token_ids": tuple(range(100, 160)), "min_tokens": 1},
    {"temperature": 1.0, "allowed_token_ids": tuple(range(50, 90))},
)


@dataclass(frozen=True)
class Replays(Part):
    """The episodes of one model from `first` on.

    Attributes:
        count: episodes of `steps` steps each.
    """

    first: int
    count: int
    steps: int
    session: ClassVar[str] = "replays"

    @property
    def name(self) -> str:
        return f"replays, episodes {self.first} to {self.first + self.count - 1}"

    def measure(self, session: ReplaySession) -> Figures:
        """Return the number of steps replayed, and the seeds with results that differ."""
        start = time.perf_counter()
        unequal: list[str] = []
        for episode in range(self.first, self.first + self.count):
            unequal += session.episode(episode, self.steps)
        return {
            "replays": self.count * self.steps,
            "unequal": unequal,
            "seconds": time.perf_counter() - start,
            "kinds": session.steps.take_kinds(),
        }


class ReplaySession:
    """An engine with dummy weights, which serves one episode after the other.

    Args:
        folder: a checkpoint of `shape`, which is that of one of `models`, without weights.
        deadline: not used: parts are short.
    """

    def __init__(
        self, shape: Shape, workload: Workload, folder: Path, device: torch.device, deadline: float
    ) -> None:
        self._model = models(tiny=device.type == "cpu")[shape.label]
        self._vocab = shape.vocab
        self._core = EngineCore(
            EngineConfig.parse(
                {
                    "block_size": 16,
                    "max_num_seqs": 32,
                    "enable_prefix_caching": True,
                    **self._model.settings,
                    "model": str(folder),
                    "load_format": "dummy",
                    "device": device.type,
                }
            )
        )
        # What the first request with penalties allocates is part of the state.
        params = {"presence_penalty": 1.0, "max_tokens": 1}
        self._core.add_request(AddRequest(0, pack_token_ids([1]), params))
        while self._core.has_unfinished_requests():
            self._core.step()
        runner = self._core._runner
        assert isinstance(runner, ModelRunner)
        self.steps = RepeatedSteps(runner)
        self._core._runner = self.steps
        # The host's state before the first request. What is on the device is not copied.
        self._shared = (self.steps, self._core.tokenizer, self._core.detokenizer)
        self._pristine = self._copy(vars(self._core))

    def episode(
        self, episode: int, num_steps: int = STEPS, *, again: int | None = None
    ) -> list[str]:
        """Serve random requests for `num_steps` steps, and replay each of them.

        Args:
            again: replay the step of this number very often instead, and no other.

        Returns:
            The seed of each step with results that differ, and which of them do.
        """
        core, model = self._core, self._model
        vars(core).update(self._copy(self._pristine))
        self.steps.clear()
        draw = random.Random(f"{model.label}:{episode}")
        uid, unequal = 0, []
        for step in range(num_steps):
            new = draw.randint(1, model.requests) if not step else draw.random() < _ARRIVAL
            while new or not core.has_unfinished_requests():
                core.add_request(self._request(uid, draw))
                uid += 1
                new = max(new - 1, 0)
            if step and draw.random() < _CANCEL:
                core.abort(draw.randrange(uid))
            if again is None:
                self.steps.repeats = 2
            else:
                self.steps.repeats = _AGAIN if step == again else 1
            core.step()
            core.check_integrity()
            differences = self.steps.take_differences()
            unequal += [f"{model.label}:{episode}:{step}: {text}" for text in differences]
        self.steps.repeats = 1
        self._finish()
        return unequal

    def clear(self) -> None:
        """Do nothing: each episode starts afresh."""

    def _finish(self) -> None:
        """Abort all requests, and read the step in flight."""
        for uid in list(self._core.scheduler.unfinished):
            self._core.abort(uid)
        while self._core.has_unfinished_requests():
            self._core.step()

    def _request(self, uid: int, draw: random.Random) -> AddRequest:
        length = round(self._model.longest ** draw.random())
        prompt = [draw.randrange(self._vocab) for _ in range(length)]
        params = {
            "max_tokens": draw.choice(_OUTPUTS),
            "seed": draw.randrange(2**32),
            "ignore_eos": True,
            **draw.choice(_SAMPLING),
        }
        return AddRequest(uid, pack_token_ids(prompt), params)

    def _copy(self, state: dict[str, Any]) -> dict[str, Any]:
        return copy.deepcopy(state, {id(shared): shared for shared in self._shared})


def groups(num_replays: int, workload: Workload, *, tiny: bool) -> list[Group]:
    """Return the groups that replay `num_replays` steps, or a few more, on all models.

    Those of a model are independent: they can be measured at the same time.
    """
    steps = _TINY_STEPS if tiny else STEPS
    episodes = -(-num_replays // (steps * len(models())))
    processes = 1 if tiny else _PROCESSES
    found: list[Group] = []
    for model in models(tiny=tiny).values():
        parts = tuple(
            Replays(model.shape, workload, first, min(_EPISODES, episodes - first), steps)
            for first in range(0, episodes, _EPISODES)
        )
        shares = [parts[index::processes] for index in range(processes)]
        found += [
            Group(model.shape, f"replays {index}", "replays", share)
            for index, share in enumerate(shares)
            if share
        ]
    return found


def again(seed: str) -> int:
    """Replay one step many times, and print what differs; return 1 if something does."""
    label, episode, step = seed.split(":")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = models(tiny=device.type == "cpu")[label].shape
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(shape, Path(folder))
        session = ReplaySession(shape, FULL, Path(folder), device, 0.0)
        unequal = session.episode(int(episode), int(step) + 1, again=int(step))
    print("\n".join(unequal) or f"{seed}: {_AGAIN} runs gave the same bits", file=sys.stdout)
    return int(bool(unequal))
