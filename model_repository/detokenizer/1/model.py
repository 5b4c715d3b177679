"""Detokenizer stage: tokens -> text, and the way back for cancellations."""

# ruff: noqa: E402 (imports of ours need the path first)

import sys
from pathlib import Path
from typing import Any

# The stub's Python has the working directory first, whose files are not ours to run.
sys.path[:] = filter(None, sys.path)
ROOT = Path(__file__).resolve().parents[3]
if (ROOT / "engine" / "__init__.py").is_file():  # a checkout or wheel, not a copied repository
    sys.path.insert(0, str(ROOT))

from engine.errors import TridentError
from engine.service.link import DetokenizerEnd
from engine.service.outputs import strings
from engine.service.stages.postprocessor import Postprocessor, decode_message
from engine.service.triton import Stage, input_tensors


class TritonPythonModel:
    """Stateless: everything it needs for a response is in `detokenizer_input`."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer."""
        self._stage = Stage(args)
        self._postprocess = self._stage.start(Postprocessor.from_config)
        self._link = DetokenizerEnd()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request with text."""
        return [self._respond(request) for request in requests]

    def finalize(self) -> None:
        """Close the link."""
        self._link.close()

    def _respond(self, request: Any) -> Any:
        try:
            data = memoryview(input_tensors(request)["detokenizer_input"].reshape(-1))
            message = decode_message(data, self._link)
            if message.number:
                self._link.acknowledge(data, message.number)
            if message.check_cancelled and request.is_cancelled():
                self._link.cancel(data, message.uid)
            if message.error is not None:
                raise TridentError.of(message.error)
        except Exception as error:
            return self._stage.error_response(error)
        try:
            return self._stage.response(self._postprocess(message))
        except Exception as error:
            if message.last:
                return self._stage.error_response(error)
            # An error here would end the ensemble's request before the engine's: the engine sends
            # it, behind the responses that are on their way.
            self._link.fail(data, message.uid, str(self._stage.for_client(error)))
            return self._stage.response({"text_output": strings([""] * len(message.chunks))})
