"""Tokenizer stage: text or chat messages and sampling inputs -> what the engine takes."""

# ruff: noqa: E402 (imports of ours need the path first)

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The stub's Python has the working directory first, whose files are not ours to run.
sys.path[:] = filter(None, sys.path)
ROOT = Path(__file__).resolve().parents[3]
if (ROOT / "engine" / "__init__.py").is_file():  # a checkout or wheel, not a copied repository
    sys.path.insert(0, str(ROOT))

from engine.service.parameters import queue_tenant
from engine.service.stages.preprocessor import Preprocessor
from engine.service.stages.request_inputs import parse_inputs
from engine.service.stages.tokenize import tokenize_tensors
from engine.service.stages.tokenized_request import engine_tensors, stop_tensors
from engine.service.stages.tokenizer_queue import TokenizerQueue, size_of
from engine.service.tensors import InputReader, Tensors
from engine.service.triton import Stage, input_tensors, request_id, request_parameters, send


class TritonPythonModel:
    """Validates each request; a wrong one ends here."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer."""
        self._stage = Stage(args)
        self._preprocess = self._stage.start(Preprocessor.from_config)
        self._queue = self._stage.start(TokenizerQueue.of)
        self._tenant_key = self._stage.start(lambda config: config.tenant_key)

    def execute(self, requests: list[Any]) -> None:
        """Queue each request; its answer, the inputs of the engine, follows from another thread."""
        arrival_time = time.monotonic()
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._submit(request, sender, arrival_time)
            except Exception as error:
                self._send(sender, self._stage.error_response(error))

    def finalize(self) -> None:
        """Answer what waits."""
        self._queue.close()

    def _submit(self, request: Any, sender: Any, arrival_time: float) -> None:
        # Of `request` itself nothing is kept: its tensors would stay in shared memory. The arrays
        # are copies of them, made by the Python backend.
        tensors = input_tensors(request)
        if (stop := stop_tensors(tensors)) is not None:
            # Not before the request that it stops, which has the same id.
            self._queue.put_after(lambda: self._answer(sender, lambda: stop), request_id(request))
            return
        parameters, timeout_us = request_parameters(request), request.timeout()

        def convert() -> Tensors:
            if (asked := tokenize_tensors(tensors, self._preprocess)) is not None:
                return asked
            inputs = parse_inputs(tensors, parameters, timeout_us)
            return engine_tensors(self._preprocess(inputs, arrival_time))

        self._queue.put(
            lambda: self._answer(sender, convert),
            size_of(tensors),
            tenant=queue_tenant(InputReader(tensors), parameters, self._tenant_key),
            request_id=request_id(request),
        )

    def _answer(self, sender: Any, convert: Callable[[], Tensors]) -> None:
        try:
            response = self._stage.response(convert())
        except Exception as error:
            response = self._stage.error_response(error)
        self._send(sender, response)

    def _send(self, sender: Any, response: Any) -> None:
        try:
            send(sender, response, last=True)
        except Exception:  # there is nobody to report it to; the other requests go on
            self._stage.log.exception("a response could not be sent")
