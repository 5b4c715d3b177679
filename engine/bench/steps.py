"""Steps: an engine that runs sequences of random tokens, step by step."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from engine.config.engine_config import EngineConfig
from engine.protocol.messages import AddRequest
from engine.protocol.token_ids import pack_token_ids
from engine.ranks.leader import start_core


class Steps:
    """An engine with these settings, alone in this process."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.core = start_core(EngineConfig.parse(settings))
        self._uid = 0

    def ask(self, prompt: Sequence[int], **params: Any) -> None:
        """Add a request with these sampling parameters."""
        self._uid += 1
        self.core.add_request(AddRequest(self._uid, pack_token_ids(prompt), params))

    def add(self, prompts: Sequence[Sequence[int]], *, max_tokens: int = 2**20) -> None:
        """Add prompts, to be answered greedily."""
        for prompt in prompts:
            self.ask(prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)

    def prompts(self, lengths: Sequence[int], *, seed: int) -> list[list[int]]:
        """Return random prompts of these lengths, without common prefixes."""
        draw = random.Random(seed)
        vocab = range(self.core.ready.vocab_size)
        return [draw.choices(vocab, k=length) for length in lengths]

    def fill(self, batch: int, context: int) -> None:
        """Add `batch` sequences of `context` tokens, and step until all decode together.

        The first ones decode while the last ones prefill.

        Raises:
            ValueError: the KV cache cannot hold so many.
        """
        self.add(self.prompts([context] * batch, seed=batch))
        while len(self.core.step()) < batch:
            if not self.core.has_unfinished_requests():
                raise ValueError(
                    f"the KV cache has no room for {batch} sequences of {context} tokens; ask for "
                    "fewer"
                )

    def run(self, count: int, batch: int) -> None:
        """Run steps, each of which gives `batch` sequences a token."""
        for _ in range(count):
            assert len(self.core.step()) == batch, "a sequence has got no token, or ended"

    def clear(self) -> None:
        """Abort unfinished requests, and assert that no block has leaked."""
        for uid in list(self.core.scheduler.unfinished):
            self.core.abort(uid)
        while self.core.has_unfinished_requests():
            self.core.step()
        self.core.check_integrity()
        self.core.check_idle()
