"""Decode steps: a batch of sequences of the same context gets one token each."""

from __future__ import annotations

import time
from dataclasses import dataclass

from engine.bench import floors
from engine.bench.driver import EngineDriver
from engine.bench.floors import Ceilings
from engine.bench.part import Figures, TimedPart
from engine.bench.wait_clock import WaitClock
from engine.bench.workload import prompts
from kernels.bench.case import Aim

HOST_AIM = Aim(micros=400)  # of a step, with this many sequences
HOST_AIM_BATCH = 256
_AIMS = {
    ("0.5b", 1): Aim(micros=600),
    ("8b", 1): Aim(share=0.85),
    ("8b", 64): Aim(share=0.75),
    ("8b", 256): Aim(share=0.75),
}


@dataclass(frozen=True)
class Decode(TimedPart):
    """The seconds of a step of `batch` sequences, and the host's share of them."""

    batch: int

    @property
    def name(self) -> str:
        return f"decode step, B = {self.batch}"

    @property
    def aim(self) -> Aim | None:
        return _AIMS.get((self.shape.label, self.batch))

    @property
    def host_aim(self) -> Aim | None:
        """The target of the host's time, if any."""
        return HOST_AIM if self.batch == HOST_AIM_BATCH else None

    def floor(self, figures: Figures, ceilings: Ceilings) -> float:
        return floors.decode_seconds(
            self.shape, self.batch, round(self.batch * figures["context"]), ceilings
        )

    def measure(self, session: EngineDriver) -> Figures:
        steps = self.workload.decode_steps
        before = self.workload.warm_up_steps
        # The middle step has the workload's context.
        length = self.workload.context - before - steps // 2
        # The first sequences decode while the last ones prefill.
        most = before + steps + self.batch + 2
        waiting = {
            session.add(prompt, most)
            for prompt in prompts([length] * self.batch, self.shape.vocab, seed=self.batch)
        }
        while waiting:
            waiting -= {*session.core.step().uids.tolist()}
        self._steps(session, before)
        context = sum(each.num_tokens for each in session.core.scheduler.running) / self.batch
        clock = WaitClock()
        session.synchronize()
        start = time.perf_counter()
        with clock.running():
            self._steps(session, steps)
            stepping = time.perf_counter() - start
        session.synchronize()
        seconds = (time.perf_counter() - start) / steps
        return {
            "seconds": seconds,
            "tokens_per_second": self.batch / seconds,
            # Without a GPU the host computes the step itself.
            "host_seconds": (stepping - clock.seconds) / steps if session.has_gpu else None,
            "context": context + steps / 2,
            "steps": steps,
        }

    def _steps(self, session: EngineDriver, count: int) -> None:
        for _ in range(count):
            outputs = session.core.step()
            assert len(outputs) == self.batch, "a sequence has got no token, or ended"
