"""Answers plain `infer()`: what the ensemble streams, in one response."""

# ruff: noqa: E402 (imports of ours need the path first)

import sys
from functools import partial
from pathlib import Path
from typing import Any

# The stub's Python has the working directory first, whose files are not ours to run.
sys.path[:] = filter(None, sys.path)
ROOT = Path(__file__).resolve().parents[3]
if (ROOT / "engine" / "__init__.py").is_file():  # a checkout or wheel, not a copied repository
    sys.path.insert(0, str(ROOT))

from engine.service.stages.unary import UnaryCall, UnaryStage
from engine.service.tensors import Tensors
from engine.service.triton import Stage, input_tensors, request_id, request_parameters, send


class TritonPythonModel:
    """Hands requests to the engine stub; the answers come back through other threads."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the settings; the tokenizer is loaded for the first request."""
        self._stage = Stage(args)
        self._unary = self._stage.start(UnaryStage)

    def execute(self, requests: list[Any]) -> None:
        """Submit each request."""
        for request in requests:
            sender = request.get_response_sender()
            respond = partial(self._respond, sender)
            try:
                # Of `request` itself nothing is kept: its tensors would stay in shared memory.
                self._unary.submit(
                    UnaryCall(
                        tensors=input_tensors(request),
                        parameters=request_parameters(request),
                        timeout_us=request.timeout(),
                        request_id=request_id(request),
                        respond=respond,
                        is_cancelled=sender.is_cancelled,
                    )
                )
            except Exception as error:
                respond(error)

    def finalize(self) -> None:
        """Answer what waits; what the engine has gets an error."""
        self._unary.close()

    def _respond(self, sender: Any, result: Tensors | Exception) -> None:
        try:
            if isinstance(result, Exception):
                response = self._stage.error_response(result)
            else:
                response = self._stage.response(result)
            send(sender, response, last=True)
        except Exception:  # there is nobody to report it to; the other requests go on
            self._stage.log.exception("a response could not be sent")
