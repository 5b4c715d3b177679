"""Requests to an engine and what it hands out."""

from collections.abc import Callable

from engine.core.engine_core import EngineCore
from engine.protocol.messages import AddRequest, SequenceOutput
from engine.protocol.token_ids import pack_token_ids
from tests.factories.outputs import listed

MakeCore = Callable[..., EngineCore]


def request(uid: int, max_tokens: int = 9, **fields: object) -> AddRequest:
    params = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return AddRequest(uid, pack_token_ids([5, 6, 7]), {**params, **fields})


def run(core: EngineCore) -> list[SequenceOutput]:
    outputs = []
    while core.has_unfinished_requests():
        outputs += listed(core.step())
    core.check_integrity()
    return outputs
