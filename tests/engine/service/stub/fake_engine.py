"""An engine process whose model is arithmetic.

`python -m tests.engine.service.stub.fake_engine --fd N`

Each step gives every sequence its next token: the prompt's first id plus sequence index plus
position. A few first ids stand for a fault instead.
"""

import os
import socket
import sys
import time
from collections.abc import Callable

from engine.config.engine_config import EngineConfig
from engine.errors import CheckpointError, QueueFullError, RequestError
from engine.protocol.messages import (
    AddRequest,
    EngineFailed,
    Ready,
    RequestFailed,
    SequenceOutput,
    Stats,
)
from engine.protocol.step_outputs import NO_OUTPUTS, StepOutputs
from engine.protocol.token_ids import unpack_token_ids
from engine.service.process.serve import configure, serve

BAD_REQUEST, FULL, BUG, STEP_FAILS, DIES, HANGS = range(9001, 9007)
HANGS_IN_ADD, HANGS_IN_ABORT, HANGS_WHEN_IDLE, HANGS_IN_STATS = range(9007, 9011)
A_RANK_FAILS = 9011


class FakeCore:
    def __init__(
        self,
        config: EngineConfig,
        report: Callable[[str], None],
        fail: Callable[[EngineFailed], None],
    ) -> None:
        if config.model == "broken":
            raise CheckpointError("model.safetensors: is missing")
        if config.model == "bug":
            raise ZeroDivisionError("oops")
        if config.model == "crash":
            os._exit(7)
        report("pretending to load")
        self.ready = Ready(512, 10_000, 100, 16, 1584, config.max_num_seqs or 64, "a fake")
        self._running: dict[int, tuple[AddRequest, int]] = {}
        self._fail = fail
        self._hangs_in = 0  # the kind of fault that a request has asked for

    def _hang(self, kind: int) -> None:
        if self._hangs_in == kind:
            time.sleep(3600)

    def add_request(self, request: AddRequest) -> list[RequestFailed]:
        first = int(unpack_token_ids(request.prompt_token_ids)[0])
        self._hangs_in = first
        self._hang(HANGS_IN_ADD)
        match first:
            case 9001:
                raise RequestError("input_ids: is bad")
            case 9002:
                raise QueueFullError("Maximum queue size of 0 requests reached")
            case 9003:
                raise KeyError("a bug")
        self._running[request.uid] = (request, 0)
        return []

    def abort(self, uid: int) -> StepOutputs:
        self._hang(HANGS_IN_ABORT)
        if (running := self._running.pop(uid, None)) is None:
            return NO_OUTPUTS
        return StepOutputs.of(
            [
                SequenceOutput(uid=uid, index=i, token_ids=[], window_ids=[], finish_reason="abort")
                for i in range(running[0].sampling_params.get("n", 1))
            ]
        )

    def has_unfinished_requests(self) -> bool:
        return bool(self._running)

    def step(self) -> StepOutputs:
        time.sleep(0.001)
        outputs = []
        for uid, (request, position) in list(self._running.items()):
            first = int(unpack_token_ids(request.prompt_token_ids)[0])
            if first == STEP_FAILS:
                raise RuntimeError("a step failed")
            if first == A_RANK_FAILS:
                self._fail(EngineFailed("rank 1 was killed by SIGKILL", is_own_fault=False))
            if first == DIES:
                os._exit(9)
            self._hang(HANGS)
            params = request.sampling_params
            last = position + 1 >= params["max_tokens"]
            outputs += [
                SequenceOutput(
                    uid=uid,
                    index=index,
                    token_ids=[first + index + position],
                    window_ids=[first],
                    finish_reason="length" if last else None,
                )
                for index in range(params.get("n", 1))
            ]
            self._running[uid] = (request, position + 1)
            if last:
                del self._running[uid]
        return StepOutputs.of(outputs)

    def check_idle(self) -> None:
        self._hang(HANGS_WHEN_IDLE)
        assert not self._running

    def take_stats(self) -> Stats:
        self._hang(HANGS_IN_STATS)
        return Stats(num_running=len(self._running), num_waiting=0, kv_cache_usage=0.0)


if __name__ == "__main__":
    configure()
    os._exit(serve(socket.socket(fileno=int(sys.argv[-1])), FakeCore))
