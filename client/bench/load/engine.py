"""The engine alone as a target: in the load generator's own process, without a server."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from client.bench.load.connector import Connector, Event, Piece
from client.bench.load.prompts import Turn
from client.bench.load.scrape import Metrics, Sample
from engine.config.engine_config import EngineConfig
from engine.errors import TridentError
from engine.protocol.messages import AddRequest, RequestStats
from engine.protocol.token_ids import pack_token_ids
from engine.service.process.openmp import set_wait

if TYPE_CHECKING:
    from engine.core.engine_core import EngineCore

_SAMPLES_S = 0.1  # between two looks at the KV cache, each at the end of a step


class _Said(msgspec.Struct, array_like=True):
    """New tokens of one sequence; `stats` with the last."""

    token_ids: list[int]
    stats: RequestStats | None = None
    error: str = ""


class _Stream:
    """A request that runs: where its pieces go, and what is called after its last."""

    def __init__(self, pieces: list[Piece], sequences: int) -> None:
        self.pieces = pieces
        self.left = sequences
        self.ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def end(self) -> None:
        """Wake the one who asked, from any thread."""
        with suppress(RuntimeError):  # the run was cut, and its loop is closed
            self._loop.call_soon_threadsafe(self.ended.set)


class EngineConnector(Connector):
    """Asks the engine, which is in a thread that loads it and runs its steps.

    Raises:
        TridentError: it cannot be loaded.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._inbox: queue.SimpleQueue[AddRequest | int] = queue.SimpleQueue()
        self._streams: dict[int, _Stream] = {}
        self._samples: list[Sample] = []
        self._next_uid = 0
        self._loaded: Future[EngineCore] = Future()
        set_wait(config)
        threading.Thread(target=self._run, daemon=True).start()
        self._core = self._loaded.result()

    async def ask(self, turn: Turn, parameters: dict[str, Any], pieces: list[Piece]) -> None:
        """As `Connector.ask`; a request is aborted if cancelled."""
        token_ids = turn.token_ids or self._core.tokenizer.encode(turn.text)
        uid, self._next_uid = self._next_uid, self._next_uid + 1
        stream = self._streams[uid] = _Stream(pieces, parameters.get("n", 1))
        packed = pack_token_ids(token_ids, "input_ids")
        self._inbox.put(AddRequest(uid, packed, sampling_params=parameters))
        try:
            await stream.ended.wait()
        finally:
            if stream.left:
                self._inbox.put(uid)

    def events(self, pieces: list[Piece]) -> Iterator[Event]:
        """As `Connector.events`; the text comes last."""
        token_ids: list[int] = []
        before = 0.0
        for at, data in pieces:
            said = msgspec.msgpack.decode(data, type=_Said)
            stats = said.stats or RequestStats(0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0)
            yield Event(
                at,
                new=len(said.token_ids),
                prompt_tokens=stats.num_prompt_tokens,
                cached_tokens=stats.num_cached_tokens,
                error=said.error,
                is_response=at != before,  # else of another sequence of that step
            )
            token_ids += said.token_ids
            before = at if said.token_ids else before
        yield Event(before, self._core.tokenizer.decode(token_ids))

    def metrics(self) -> Metrics:
        """As `Connector.metrics`; while no request runs."""
        samples, self._samples = self._samples, []
        stats = self._core.take_stats()
        queries = stats.num_prefix_queries
        waits = stats.histograms.get("request_queue_time_seconds")
        return Metrics(
            samples=samples,
            preemptions=stats.num_preemptions,
            prefix_hits=stats.num_prefix_hits / queries if queries else 0.0,
            queue_s=waits.sum / sum(waits.counts) if waits is not None else 0.0,
        )

    async def close(self) -> None:
        """As `Connector.close`: the engine stays loaded for the next plan."""

    def _run(self) -> None:
        from engine.core.engine_core import EngineCore  # after `set_wait`, because it imports torch

        try:
            core = EngineCore(self._config)
        except TridentError as error:
            self._loaded.set_exception(error)
            return
        self._loaded.set_result(core)
        try:
            while True:
                self._take(core)
                self._step(core)
        except BaseException:  # nothing else reports it
            traceback.print_exc()
            os._exit(1)

    def _step(self, core: EngineCore) -> None:
        outputs = core.step()
        now = time.monotonic()
        for output in outputs.rows():
            self._say(output.uid, now, _Said(output.token_ids, output.stats))
        for failed in outputs.failures:
            self._fail(failed.uid, str(TridentError.of(failed.error)))
        if not self._samples or now >= self._samples[-1].at + _SAMPLES_S:
            self._samples.append(_sample(core, now))

    def _take(self, core: EngineCore) -> None:
        """Hand over what has arrived; waits while there is nothing to do."""
        while not core.has_unfinished_requests() or not self._inbox.empty():
            asked = self._inbox.get()
            if isinstance(asked, int):
                core.abort(asked)
                self._streams.pop(asked, None)
                continue
            try:
                refused = core.add_request(asked)
            except ValueError as error:
                self._fail(asked.uid, str(error))
                continue
            for each in refused:
                self._fail(each.uid, str(TridentError.of(each.error)))

    def _say(self, uid: int, at: float, said: _Said) -> None:
        stream = self._streams[uid]
        stream.pieces.append((at, msgspec.msgpack.encode(said)))
        stream.left -= said.stats is not None
        if not stream.left:
            self._streams.pop(uid).end()

    def _fail(self, uid: int, error: str) -> None:
        self._streams[uid].left = 1
        ended = RequestStats(0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0)
        self._say(uid, time.monotonic(), _Said([], ended, error))


@cache
def engine_of(settings: bytes) -> EngineConnector:
    """Return the way to the engine with these settings as JSON, which is loaded once."""
    return EngineConnector(EngineConfig.parse(msgspec.json.decode(settings)))


def _sample(core: EngineCore, at: float) -> Sample:
    """Look at the KV cache between two steps.

    A slot is filled if one of the sequences that hold its block has computed a token there.
    """
    scheduler = core.scheduler
    pool, size = scheduler.kv_cache.pool, scheduler.kv_cache.block_size
    filled: Counter[int] = Counter()
    apart = 0  # blocks that the sequences would hold if they shared none
    for request in scheduler.running:
        computed = request.num_computed_tokens
        for table in request.kv.tables:
            for block_idx, block in enumerate(table):
                if block:  # else it is behind a window
                    apart += 1
                    filled[block] = max(
                        filled[block], min(size, max(0, computed - block_idx * size))
                    )
    held = len(filled)
    return Sample(
        at,
        len(scheduler.running),
        sum(map(len, scheduler.unfinished.values())) - len(scheduler.running),
        1 - pool.num_free / pool.num_usable,
        None if not held else 1 - filled.total() / (size * held),
        None if not held else 1 - held / apart,
    )
