"""Tokenizer stage: text or chat messages and sampling inputs -> what the engine takes."""

# ruff: noqa: E402 (imports of ours need the path first)

import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
if (ROOT / "engine" / "__init__.py").is_file():  # a checkout or wheel, not a copied repository
    sys.path.insert(0, str(ROOT))

from engine.service.stages.preprocessor import Preprocessor, engine_tensors, stop_tensors
from engine.service.stages.request_inputs import parse_inputs
from engine.service.triton import Stage, input_tensors, request_parameters


class TritonPythonModel:
    """Validates each request; a wrong one ends here."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer."""
        self._stage = Stage(args)
        self._preprocess = self._stage.start(Preprocessor.from_config)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request with the inputs of the engine."""
        arrival_time = time.monotonic()
        return [self._respond(request, arrival_time) for request in requests]

    def _respond(self, request: Any, arrival_time: float) -> Any:
        try:
            tensors = input_tensors(request)
            if (stop := stop_tensors(tensors)) is not None:
                return self._stage.response(stop)
            inputs = parse_inputs(tensors, request_parameters(request), request.timeout())
            return self._stage.response(engine_tensors(self._preprocess(inputs, arrival_time)))
        except Exception as error:
            return self._stage.error_response(error)
